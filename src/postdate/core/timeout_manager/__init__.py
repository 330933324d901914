"""The timeout manager: two queues and a storage of timeouts between them. Source: specification 4; ADR 0014."""
