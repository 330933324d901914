"""AMQP 0-9-1 as RabbitMQ speaks it: wire, link, confirmed publishing, consuming. Source: ADR 0006."""
