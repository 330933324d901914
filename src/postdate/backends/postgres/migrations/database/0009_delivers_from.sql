-- The stores from which a process delivers: several endpoints may share a schema, each with a store of its own. NULL: a
-- process of an earlier version, which does not say.
ALTER TABLE {schema}.holder ADD COLUMN delivers_from smallint[];
