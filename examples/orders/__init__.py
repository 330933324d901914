"""A worked example of a saga: an order waits for its payment, reminds of it, and gives up. See docs/guides/sagas.md."""
