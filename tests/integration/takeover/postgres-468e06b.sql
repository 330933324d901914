CREATE SCHEMA takeover;
CREATE TABLE takeover.content (
    number bigint NOT NULL,
    headers text NOT NULL,
    body bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE takeover.holder (
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
CREATE SEQUENCE takeover.holder_number
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    MAXVALUE 2147483647
    CACHE 1
    CYCLE;
CREATE TABLE takeover.migration (
    subject text NOT NULL,
    version integer NOT NULL,
    name text NOT NULL
);
CREATE SEQUENCE takeover.number
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE takeover.other (
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
CREATE TABLE takeover.outbox (
    endpoint text NOT NULL,
    message_id text NOT NULL,
    handled_at timestamp with time zone NOT NULL,
    dispatched_at timestamp with time zone,
    operations bytea
);
CREATE TABLE takeover.quarantine (
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
ALTER TABLE takeover.quarantine ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME takeover.quarantine_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE takeover.queue (
    queue_id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE takeover.queue_message (
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
ALTER TABLE takeover.queue_message ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME takeover.queue_message_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
ALTER TABLE takeover.queue ALTER COLUMN queue_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME takeover.queue_queue_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE takeover.record (
    number bigint DEFAULT nextval('takeover.number'::regclass) NOT NULL,
    at timestamp with time zone NOT NULL,
    due timestamp with time zone,
    store_id smallint,
    kind smallint NOT NULL,
    message_id text NOT NULL COLLATE pg_catalog."C",
    destination text COLLATE pg_catalog."C",
    detail text
);
CREATE TABLE takeover.saga (
    saga_id text NOT NULL COLLATE pg_catalog."C",
    saga_type text NOT NULL COLLATE pg_catalog."C",
    property text NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    state text NOT NULL,
    details text NOT NULL
);
CREATE TABLE takeover."service.timeouts" (
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
CREATE TABLE takeover."service_TimeoutData" (
    "Id" uuid NOT NULL,
    "Destination" character varying(200),
    "SagaId" uuid,
    "State" bytea,
    "Time" timestamp without time zone,
    "Headers" text NOT NULL,
    "PersistenceVersion" character varying(23) NOT NULL
);
CREATE TABLE takeover.store (
    store_id smallint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);
ALTER TABLE takeover.store ALTER COLUMN store_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME takeover.store_store_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
INSERT INTO takeover.content VALUES (2, '{"kind":"stored-anew"}', '\x7365636f6e64');
INSERT INTO takeover.content VALUES (20, '{"NServiceBus.MessageId":"error-copy","NServiceBus.CorrelationId":"error-copy","NServiceBus.ConversationId":"error-copy","NServiceBus.MessageIntent":"Send","NServiceBus.OriginatingEndpoint":"service","NServiceBus.OriginatingMachine":"machine","NServiceBus.TimeSent":"2026-11-29 11:54:49:916118 Z","NServiceBus.EnclosedMessageTypes":"__main__.Boom","NServiceBus.ContentType":"application/json","NServiceBus.ReplyToAddress":"service","NServiceBus.FailedQ":"service","NServiceBus.TimeOfFailure":"2026-11-29 11:54:49:941164 Z","NServiceBus.ProcessingMachine":"machine","NServiceBus.ProcessingEndpoint":"service","$.diagnostics.hostid":"e5e61fb5d6855b509ba7acb6e6962ef3","$.diagnostics.hostdisplayname":"machine 31471","NServiceBus.ExceptionInfo.ExceptionType":"builtins.ValueError","NServiceBus.ExceptionInfo.Message":"it''s broken","NServiceBus.ExceptionInfo.Source":"builtins","NServiceBus.ExceptionInfo.StackTrace":"Traceback (most recent call last):\n  File \"/work/wt/S468/src/postdate/endpoint/handling.py\", line 77, in _handle_once\n    end = await self._end(received, context)\n          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n  File \"/work/wt/S468/src/postdate/endpoint/handling.py\", line 147, in _end\n    return self.outgoing.end_of(await self._outgoing(received, context), RecordKind.HANDLED, also=context.work)\n                                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n  File \"/work/wt/S468/src/postdate/endpoint/handling.py\", line 158, in _outgoing\n    await self.handlers.call(received, context)\n  File \"/work/wt/S468/src/postdate/endpoint/handlers.py\", line 45, in call\n    await handle(message, context)\n  File \"/work/wt/S/tests/integration/takeover/make.py\", line 242, in fail\n    raise ValueError(message.text)\nValueError: it''s broken\n"}', '\x7b2274657874223a22697427732062726f6b656e227d');
INSERT INTO takeover.content VALUES (22, '{"kind":"moved"}', '\x6d6f766564');
INSERT INTO takeover.content VALUES (30, '{"kind":"sent"}', '\x73656e74');
INSERT INTO takeover.content VALUES (31, '{}', '\x696e2d68616e64');
INSERT INTO takeover.content VALUES (32, '{"kind":"plain"}', '\x706c61696e');
INSERT INTO takeover.content VALUES (33, '{"kind":"é 🕰","quote":"it''s \"so\"\\","line":"a\nb"}', '\x776974682d68656164657273');
INSERT INTO takeover.content VALUES (34, '{"kind":"expiring"}', '\x6578706972696e67');
INSERT INTO takeover.content VALUES (35, '{"kind":"ü 🕰 it''s \"id\""}', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff');
INSERT INTO takeover.content VALUES (36, '{"kind":"large"}', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff02030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff05060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff12131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff15161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff18191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff');
INSERT INTO takeover.content VALUES (37, '{"kind":"key~00000001"}', '\x6b65797e3030303030303031');
INSERT INTO takeover.content VALUES (38, '{"kind":"rescheduled"}', '\x72657363686564756c6564');
INSERT INTO takeover.content VALUES (48, '{"kind":"sealed"}		 	   	 		 	 		   	  		  		 	   ', '\x7365616c6564');
INSERT INTO takeover.content VALUES (49, '{"kind":"retried"}', '\x72657472696564');
INSERT INTO takeover.content VALUES (51, '{"kind":"claimed"}', '\x636c61696d6564');
INSERT INTO takeover.holder VALUES (1, 31471, 'machine', '2026-11-29 11:54:49.829489+00', false, '{}', '85b6aa96c62e9afd', '2026-11-29 11:54:49.829841+00', '00:01:00', NULL);
INSERT INTO takeover.holder VALUES (2, 31471, 'machine', '2026-11-29 11:54:49.938142+00', false, '{error,orders,paused,service}', '85b6aa96c62e9afd', '2026-11-29 11:54:49.938442+00', '00:01:00', NULL);
INSERT INTO takeover.migration VALUES ('', 1, 'initial');
INSERT INTO takeover.migration VALUES ('', 2, 'expiry in queues');
INSERT INTO takeover.migration VALUES ('', 3, 'quarantine');
INSERT INTO takeover.migration VALUES ('', 4, 'signs of life');
INSERT INTO takeover.migration VALUES ('service.timeouts', 1, 'initial');
INSERT INTO takeover.migration VALUES ('other', 1, 'initial');
INSERT INTO takeover.migration VALUES ('saga', 1, 'initial');
INSERT INTO takeover.migration VALUES ('outbox', 1, 'initial');
INSERT INTO takeover.outbox VALUES ('service', 'undispatched', '2026-01-31 12:00:00+00', NULL, '\x82a776657273696f6e01aa6f7065726174696f6e739284ab64657374696e6174696f6ea66f7264657273aa6d6573736167655f6964ae756e646973706174636865642d31a76865616465727381a46b696e64a2c3a9a4626f6479c404006e6f7786ab64657374696e6174696f6ea66f7264657273aa6d6573736167655f6964ae756e646973706174636865642d32a76865616465727381a46b696e64ae756e646973706174636865642d32a4626f6479c40e756e646973706174636865642d32a764656c61796564c3a3647565cf000649aeaadcd400');
INSERT INTO takeover.outbox VALUES ('service', 'dispatched', '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', NULL);
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (1, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 1, 'torn', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x746f726e');
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (2, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 2, 'stored-anew', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x73746f7265642d616e6577');
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (3, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, NULL, 3, 'delivered-anew', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x64656c6976657265642d616e6577');
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (4, '2026-01-31 12:00:01+00', 'the headers and the body are gone', 1, NULL, 4, 'no-content', 'orders', '2026-01-31 12:00:00+00', NULL, 0, NULL, NULL);
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (5, '2026-01-31 12:00:01+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 2, NULL, 17, 'torn', 'orders', '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x746f726e');
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (6, '2026-11-29 11:54:49.996802+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', 1, 1, 5, 'moved-torn', NULL, '2026-01-31 12:00:00+00', NULL, 0, '{torn', '\x6d6f7665642d746f726e');
INSERT INTO takeover.quarantine OVERRIDING SYSTEM VALUE VALUES (7, '2026-11-29 11:54:49.996897+00', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', NULL, 1, 6, 'sent-torn', NULL, NULL, NULL, 0, '{torn', '\x73656e742d746f726e');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (1, 'orders');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (2, 'paused');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (3, 'service');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (4, 'error');
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (4, 2, 20, NULL, NULL, NULL, 0, NULL, 'error-copy', NULL);
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (1, 4, 22, '2026-01-31 12:00:00+00', NULL, NULL, 1, 1, 'moved', NULL);
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (1, 7, 30, NULL, NULL, NULL, 0, NULL, 'sent', '2126-11-30 11:54:49.999353+00');
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (2, 8, 31, NULL, NULL, 2, 0, NULL, 'in-hand', NULL);
INSERT INTO takeover.record VALUES (1, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (2, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'stored-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (3, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'delivered-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (4, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'no-content', 'orders', NULL);
INSERT INTO takeover.record VALUES (5, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (6, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'stored-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (7, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'delivered-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (8, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'no-content', 'orders', 'unreadable: the headers and the body are gone');
INSERT INTO takeover.record VALUES (11, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 8, 'stored-anew', 'orders', 'came back from the error queue');
INSERT INTO takeover.record VALUES (14, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 8, 'delivered-anew', 'orders', 'came back from the error queue');
INSERT INTO takeover.record VALUES (15, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'delivered-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (16, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 8, 'stored-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (17, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 2, 1, 'torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (18, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 2, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (21, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (22, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'moved', 'orders', NULL);
INSERT INTO takeover.record VALUES (23, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (24, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'moved', 'orders', NULL);
INSERT INTO takeover.record VALUES (25, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 3, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (26, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'moved-torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (27, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'moved-torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (29, '2026-11-29 11:54:49.99667+00', '2026-01-31 12:00:00+00', 1, 7, 'moved-torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (32, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'plain', 'orders', NULL);
INSERT INTO takeover.record VALUES (33, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'with-headers', 'orders', NULL);
INSERT INTO takeover.record VALUES (34, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'expiring', 'orders', NULL);
INSERT INTO takeover.record VALUES (35, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'ü 🕰 it''s "id"', 'orders', NULL);
INSERT INTO takeover.record VALUES (36, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'large', 'orders', NULL);
INSERT INTO takeover.record VALUES (37, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'key~00000001', 'orders', NULL);
INSERT INTO takeover.record VALUES (38, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'rescheduled', 'orders', NULL);
INSERT INTO takeover.record VALUES (39, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'cancelled', 'orders', NULL);
INSERT INTO takeover.record VALUES (40, '2026-01-31 12:00:00+00', '2026-01-31 14:00:00+00', 1, 8, 'rescheduled', 'orders', NULL);
INSERT INTO takeover.record VALUES (41, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 6, 'cancelled', 'orders', NULL);
INSERT INTO takeover.record VALUES (42, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'delivered', 'orders', NULL);
INSERT INTO takeover.record VALUES (43, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'delivered', 'orders', 'as it went');
INSERT INTO takeover.record VALUES (44, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'expired', 'orders', NULL);
INSERT INTO takeover.record VALUES (45, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 5, 'expired', 'orders', 'as it went');
INSERT INTO takeover.record VALUES (46, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'failed', 'orders', NULL);
INSERT INTO takeover.record VALUES (47, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'failed', 'orders', 'as it went');
INSERT INTO takeover.record VALUES (48, '2026-01-31 12:00:00+00', '2026-01-31 13:00:00+00', 1, 1, 'sealed', 'orders', NULL);
INSERT INTO takeover.record VALUES (49, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'retried', 'orders', NULL);
INSERT INTO takeover.record VALUES (50, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 4, 'retried', 'orders', 'no route');
INSERT INTO takeover.record VALUES (51, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'claimed', 'orders', NULL);
INSERT INTO takeover.saga VALUES ('id-1', 'Order', 'order_id', 'o-1 é', 2, '{"n":2}', '{"timeouts":{}}');
INSERT INTO takeover."service.timeouts" VALUES (2, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'stored-anew', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (32, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'plain', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (33, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'with-headers', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (34, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', '2126-02-01 12:00:00+00', NULL, 0, 'expiring', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (35, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'ü 🕰 it''s "id"', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (36, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'large', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (37, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'key~00000001', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (38, '2026-01-31 14:00:00+00', '2026-01-31 14:00:00+00', NULL, NULL, 0, 'rescheduled', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (48, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'sealed', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (49, '2026-01-31 12:00:00+00', '2026-01-31 15:00:00+00', NULL, NULL, 1, 'retried', 'orders');
INSERT INTO takeover."service.timeouts" VALUES (51, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', NULL, NULL, 0, 'claimed', 'orders');
INSERT INTO takeover."service_TimeoutData" VALUES ('00000000-0000-4000-8000-000000000001', 'orders', '00000000-0000-0000-0000-000000000000', '\x74696d656f75742031', '2026-01-31 12:00:00', '{"kind":"\u00e9"}', '1.0.0.0');
INSERT INTO takeover."service_TimeoutData" VALUES ('00000000-0000-4000-8000-000000000002', 'orders', '00000000-0000-4000-8000-00000000000a', '\x74696d656f75742032', '2026-02-01 12:00:00', '{"kind":"\u00e9"}', '1.0.0.0');
INSERT INTO takeover.store OVERRIDING SYSTEM VALUE VALUES (1, 'service.timeouts');
INSERT INTO takeover.store OVERRIDING SYSTEM VALUE VALUES (2, 'other');
SELECT pg_catalog.setval('takeover.holder_number', 2, true);
SELECT pg_catalog.setval('takeover.number', 51, true);
SELECT pg_catalog.setval('takeover.quarantine_number_seq', 7, true);
SELECT pg_catalog.setval('takeover.queue_message_number_seq', 8, true);
SELECT pg_catalog.setval('takeover.queue_queue_id_seq', 6, true);
SELECT pg_catalog.setval('takeover.store_store_id_seq', 2, true);
ALTER TABLE ONLY takeover.content
    ADD CONSTRAINT content_pkey PRIMARY KEY (number);
ALTER TABLE ONLY takeover.holder
    ADD CONSTRAINT holder_pkey PRIMARY KEY (holder);
ALTER TABLE ONLY takeover.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (subject, version);
ALTER TABLE ONLY takeover.other
    ADD CONSTRAINT other_pkey PRIMARY KEY (number);
ALTER TABLE ONLY takeover.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (endpoint, message_id);
ALTER TABLE ONLY takeover.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (number);
ALTER TABLE ONLY takeover.queue_message
    ADD CONSTRAINT queue_message_pkey PRIMARY KEY (queue_id, number);
ALTER TABLE ONLY takeover.queue
    ADD CONSTRAINT queue_name_key UNIQUE (name);
ALTER TABLE ONLY takeover.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (queue_id);
ALTER TABLE ONLY takeover.saga
    ADD CONSTRAINT saga_pkey PRIMARY KEY (saga_type, saga_id);
ALTER TABLE ONLY takeover.saga
    ADD CONSTRAINT saga_saga_type_property_value_key UNIQUE (saga_type, property, value);
ALTER TABLE ONLY takeover."service.timeouts"
    ADD CONSTRAINT "service.timeouts_pkey" PRIMARY KEY (number);
ALTER TABLE ONLY takeover."service_TimeoutData"
    ADD CONSTRAINT "service_TimeoutData_pkey" PRIMARY KEY ("Id");
ALTER TABLE ONLY takeover.store
    ADD CONSTRAINT store_name_key UNIQUE (name);
ALTER TABLE ONLY takeover.store
    ADD CONSTRAINT store_pkey PRIMARY KEY (store_id);
CREATE INDEX other_attempt_at_number_idx ON takeover.other USING btree (attempt_at, number);
CREATE INDEX other_due_idx ON takeover.other USING btree (due) WHERE (failures > 0);
CREATE INDEX other_holder_idx ON takeover.other USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX outbox_dispatched ON takeover.outbox USING btree (endpoint, dispatched_at) WHERE (dispatched_at IS NOT NULL);
CREATE INDEX queue_message_ends ON takeover.queue_message USING btree (ends_at) WHERE ((ends_at IS NOT NULL) AND (holder IS NULL));
CREATE INDEX queue_message_held ON takeover.queue_message USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX record_delivered ON takeover.record USING brin (due) WITH (pages_per_range='32', autosummarize='on') WHERE (kind = ANY (ARRAY[2, 3]));
CREATE INDEX record_number ON takeover.record USING brin (number) WITH (pages_per_range='32', autosummarize='on');
CREATE INDEX record_other ON takeover.record USING btree (message_id) WHERE (kind > 3);
CREATE UNIQUE INDEX record_scheduled ON takeover.record USING btree (message_id, store_id) WHERE (kind = 1);
CREATE INDEX "service.timeouts_attempt_at_number_idx" ON takeover."service.timeouts" USING btree (attempt_at, number);
CREATE INDEX "service.timeouts_due_idx" ON takeover."service.timeouts" USING btree (due) WHERE (failures > 0);
CREATE INDEX "service.timeouts_holder_idx" ON takeover."service.timeouts" USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX "service_TimeoutData_SagaId_idx" ON takeover."service_TimeoutData" USING btree ("SagaId");
CREATE INDEX "service_TimeoutData_Time_idx" ON takeover."service_TimeoutData" USING btree ("Time");
