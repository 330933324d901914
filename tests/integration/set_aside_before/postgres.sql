CREATE SCHEMA set_aside_before;
CREATE TABLE set_aside_before.content (
    number bigint NOT NULL,
    headers text NOT NULL,
    body bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE set_aside_before.destination_limit (
    lane bigint NOT NULL,
    store smallint NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    limits text NOT NULL,
    free_at timestamp with time zone NOT NULL
);
ALTER TABLE set_aside_before.destination_limit ALTER COLUMN lane ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME set_aside_before.destination_limit_lane_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE set_aside_before.holder (
    holder bigint NOT NULL,
    pid integer NOT NULL,
    machine text NOT NULL,
    started_at timestamp with time zone NOT NULL,
    delivers boolean DEFAULT false NOT NULL,
    receives text[] DEFAULT ARRAY[]::text[] NOT NULL,
    mark text,
    seen timestamp with time zone,
    holds_at_most interval,
    ahead interval
);
CREATE SEQUENCE set_aside_before.holder_number
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    MAXVALUE 2147483647
    CACHE 1
    CYCLE;
CREATE TABLE set_aside_before.migration (
    subject text NOT NULL,
    version integer NOT NULL,
    name text NOT NULL
);
CREATE SEQUENCE set_aside_before.number
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE set_aside_before.other (
    number bigint NOT NULL,
    due timestamp with time zone NOT NULL,
    attempt_at timestamp with time zone,
    expires_at timestamp with time zone,
    holder bigint,
    failures integer DEFAULT 0 NOT NULL,
    message_id text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE set_aside_before.quarantine (
    number bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    reason text NOT NULL,
    store_id smallint,
    queue_id integer,
    place bigint NOT NULL,
    message_id text NOT NULL COLLATE pg_catalog."C",
    destination text COLLATE pg_catalog."C",
    due timestamp with time zone,
    expires_at timestamp with time zone,
    failures integer NOT NULL,
    headers text,
    body bytea
);
ALTER TABLE set_aside_before.quarantine ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME set_aside_before.quarantine_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE set_aside_before.queue (
    queue_id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE set_aside_before.queue_message (
    queue_id integer NOT NULL,
    number bigint NOT NULL,
    content bigint NOT NULL,
    due timestamp with time zone,
    expires_at timestamp with time zone,
    holder bigint,
    failures integer DEFAULT 0 NOT NULL,
    store_id smallint,
    message_id text NOT NULL COLLATE pg_catalog."C",
    ends_at timestamp with time zone
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
ALTER TABLE set_aside_before.queue_message ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME set_aside_before.queue_message_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
ALTER TABLE set_aside_before.queue ALTER COLUMN queue_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME set_aside_before.queue_queue_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE set_aside_before.record (
    number bigint DEFAULT nextval('set_aside_before.number'::regclass) NOT NULL,
    at timestamp with time zone NOT NULL,
    due timestamp with time zone,
    store_id smallint,
    kind smallint NOT NULL,
    message_id text NOT NULL COLLATE pg_catalog."C",
    destination text COLLATE pg_catalog."C",
    detail text
);
CREATE TABLE set_aside_before."service.timeouts" (
    number bigint NOT NULL,
    due timestamp with time zone NOT NULL,
    attempt_at timestamp with time zone,
    expires_at timestamp with time zone,
    holder bigint,
    failures integer DEFAULT 0 NOT NULL,
    message_id text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE set_aside_before.store (
    store_id smallint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);
ALTER TABLE set_aside_before.store ALTER COLUMN store_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME set_aside_before.store_store_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
INSERT INTO set_aside_before.content VALUES (2, '{"kind":"new"}', '\x7365636f6e64');
INSERT INTO set_aside_before.migration VALUES ('', 1, 'initial');
INSERT INTO set_aside_before.migration VALUES ('', 2, 'expiry in queues');
INSERT INTO set_aside_before.migration VALUES ('', 3, 'quarantine');
INSERT INTO set_aside_before.migration VALUES ('', 4, 'signs of life');
INSERT INTO set_aside_before.migration VALUES ('', 5, 'destination limits');
INSERT INTO set_aside_before.migration VALUES ('service.timeouts', 1, 'initial');
INSERT INTO set_aside_before.migration VALUES ('service.timeouts', 2, 'postponed');
INSERT INTO set_aside_before.migration VALUES ('service.timeouts', 3, 'keys');
INSERT INTO set_aside_before.migration VALUES ('other', 1, 'initial');
INSERT INTO set_aside_before.migration VALUES ('other', 2, 'postponed');
INSERT INTO set_aside_before.migration VALUES ('other', 3, 'keys');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (1, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 1, 'torn', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x00746f726e');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (2, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 2, 'stored-anew', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x0073746f7265642d616e6577');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (3, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 3, 'delivered-anew', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x0064656c6976657265642d616e6577');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (4, '2026-01-31 12:00:01+00', 'the headers and the body are gone', 1, NULL, 4, 'no-content', 'orders', '2026-01-31 12:00:00+00', NULL, 0, NULL, NULL);
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (5, '2026-11-29 09:00:17.591293+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, 1, 1, 'moved', NULL, '2026-01-31 11:59:59+00', NULL, 0, '{torn', '\x006d6f766564');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (6, '2026-11-29 09:00:17.591346+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', NULL, 1, 2, 'sent', NULL, NULL, NULL, 0, '{torn', '\x0073656e74');
INSERT INTO set_aside_before.quarantine OVERRIDING SYSTEM VALUE VALUES (7, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 2, NULL, 21, 'torn', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x00746f726e');
INSERT INTO set_aside_before.queue OVERRIDING SYSTEM VALUE VALUES (1, 'orders');
INSERT INTO set_aside_before.record VALUES (1, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'torn', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (2, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'stored-anew', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (3, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'delivered-anew', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (4, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'no-content', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (5, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO set_aside_before.record VALUES (6, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'stored-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO set_aside_before.record VALUES (7, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'delivered-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO set_aside_before.record VALUES (8, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'no-content', 'orders', 'unreadable: the headers and the body are gone');
INSERT INTO set_aside_before.record VALUES (11, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 8, 'delivered-anew', 'orders', 'came back from the error queue');
INSERT INTO set_aside_before.record VALUES (12, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 2, 'delivered-anew', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (15, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 8, 'stored-anew', 'orders', 'came back from the error queue');
INSERT INTO set_aside_before.record VALUES (16, '2026-01-31 11:59:58+00', '2026-01-31 11:59:59+00', 1, 1, 'moved', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (17, '2026-01-31 12:00:00+00', '2026-01-31 11:59:59+00', 1, 2, 'moved', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (20, '2026-11-29 09:00:17.591021+00', '2026-01-31 11:59:59+00', 1, 7, 'moved', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO set_aside_before.record VALUES (21, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 2, 1, 'torn', 'orders', NULL);
INSERT INTO set_aside_before.record VALUES (22, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 2, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO set_aside_before."service.timeouts" VALUES (2, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', NULL, NULL, 0, 'stored-anew', 'orders');
INSERT INTO set_aside_before.store OVERRIDING SYSTEM VALUE VALUES (1, 'service.timeouts');
INSERT INTO set_aside_before.store OVERRIDING SYSTEM VALUE VALUES (2, 'other');
SELECT pg_catalog.setval('set_aside_before.destination_limit_lane_seq', 1, false);
SELECT pg_catalog.setval('set_aside_before.holder_number', 2, true);
SELECT pg_catalog.setval('set_aside_before.number', 22, true);
SELECT pg_catalog.setval('set_aside_before.quarantine_number_seq', 7, true);
SELECT pg_catalog.setval('set_aside_before.queue_message_number_seq', 3, true);
SELECT pg_catalog.setval('set_aside_before.queue_queue_id_seq', 1, true);
SELECT pg_catalog.setval('set_aside_before.store_store_id_seq', 2, true);
ALTER TABLE ONLY set_aside_before.content
    ADD CONSTRAINT content_pkey PRIMARY KEY (number);
ALTER TABLE ONLY set_aside_before.destination_limit
    ADD CONSTRAINT destination_limit_pkey PRIMARY KEY (lane);
ALTER TABLE ONLY set_aside_before.destination_limit
    ADD CONSTRAINT destination_limit_store_destination_key UNIQUE (store, destination);
ALTER TABLE ONLY set_aside_before.holder
    ADD CONSTRAINT holder_pkey PRIMARY KEY (holder);
ALTER TABLE ONLY set_aside_before.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (subject, version);
ALTER TABLE ONLY set_aside_before.other
    ADD CONSTRAINT other_pkey PRIMARY KEY (number);
ALTER TABLE ONLY set_aside_before.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (number);
ALTER TABLE ONLY set_aside_before.queue_message
    ADD CONSTRAINT queue_message_pkey PRIMARY KEY (queue_id, number);
ALTER TABLE ONLY set_aside_before.queue
    ADD CONSTRAINT queue_name_key UNIQUE (name);
ALTER TABLE ONLY set_aside_before.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (queue_id);
ALTER TABLE ONLY set_aside_before."service.timeouts"
    ADD CONSTRAINT "service.timeouts_pkey" PRIMARY KEY (number);
ALTER TABLE ONLY set_aside_before.store
    ADD CONSTRAINT store_name_key UNIQUE (name);
ALTER TABLE ONLY set_aside_before.store
    ADD CONSTRAINT store_pkey PRIMARY KEY (store_id);
CREATE INDEX other_attempt_at_number_idx ON set_aside_before.other USING btree (attempt_at, number);
CREATE INDEX other_due_idx ON set_aside_before.other USING btree (due) WHERE (failures > 0);
CREATE INDEX other_due_number_idx ON set_aside_before.other USING btree (due, number) WHERE (attempt_at <> due);
CREATE INDEX other_holder_idx ON set_aside_before.other USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX queue_message_ends ON set_aside_before.queue_message USING btree (ends_at) WHERE ((ends_at IS NOT NULL) AND (holder IS NULL));
CREATE INDEX queue_message_held ON set_aside_before.queue_message USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX record_delivered ON set_aside_before.record USING brin (due) WITH (pages_per_range='32', autosummarize='on') WHERE (kind = ANY (ARRAY[2, 3]));
CREATE INDEX record_number ON set_aside_before.record USING brin (number) WITH (pages_per_range='32', autosummarize='on');
CREATE INDEX record_other ON set_aside_before.record USING btree (message_id) WHERE (kind > 3);
CREATE UNIQUE INDEX record_scheduled ON set_aside_before.record USING btree (message_id, store_id) WHERE (kind = 1);
CREATE INDEX "service.timeouts_attempt_at_number_idx" ON set_aside_before."service.timeouts" USING btree (attempt_at, number);
CREATE INDEX "service.timeouts_due_idx" ON set_aside_before."service.timeouts" USING btree (due) WHERE (failures > 0);
CREATE INDEX "service.timeouts_due_number_idx" ON set_aside_before."service.timeouts" USING btree (due, number) WHERE (attempt_at <> due);
CREATE INDEX "service.timeouts_holder_idx" ON set_aside_before."service.timeouts" USING btree (holder) WHERE (holder IS NOT NULL);
