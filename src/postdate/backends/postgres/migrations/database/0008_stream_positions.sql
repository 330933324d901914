-- How far streams have copied the records of a store: what they have not passed is not pruned (ADR 63).
CREATE TABLE {schema}.stream_position (
    store_id smallint    NOT NULL,
    name     text COLLATE "C" NOT NULL,
    number   bigint      NOT NULL,                     -- of the first record that was not copied
    at       timestamptz NOT NULL,                     -- when the stream has reported it
    PRIMARY KEY (store_id, name)
);
