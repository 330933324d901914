-- By what others know that a holder lives, although its connection stands still with its process: it shows life every
-- few seconds, and one that has not for as long as it said is ended. NULL: of a version that did not show any.
ALTER TABLE {schema}.holder
    ADD COLUMN mark          text,                     -- at the end of the names of its sessions
    ADD COLUMN seen          timestamptz,
    ADD COLUMN holds_at_most interval,
    ADD COLUMN ahead         interval;                 -- how far its clock is ahead of the server's
