-- How far streams have copied the records: what they have not passed is not pruned (ADR 63).
CREATE TABLE stream_position (
    name   TEXT    PRIMARY KEY,
    number INTEGER NOT NULL,   -- of the first record that was not copied
    at     INTEGER NOT NULL    -- when the stream has reported it
);
