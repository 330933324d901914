"""The timeout manager: two queues and a storage of timeouts between them. Source: ADR 0014."""
