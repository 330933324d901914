CREATE SCHEMA takeover;
CREATE TABLE takeover.content (
    number bigint NOT NULL,
    headers text NOT NULL,
    body bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE takeover.destination_limit (
    lane bigint NOT NULL,
    store smallint NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    limits text NOT NULL,
    free_at timestamp with time zone NOT NULL
);
ALTER TABLE takeover.destination_limit ALTER COLUMN lane ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME takeover.destination_limit_lane_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
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
    destination text NOT NULL COLLATE pg_catalog."C",
    unreadable text,
    unreadable_at timestamp with time zone
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0');
CREATE TABLE takeover.outbox (
    endpoint text NOT NULL,
    message_id text NOT NULL,
    handled_at timestamp with time zone NOT NULL,
    dispatched_at timestamp with time zone,
    operations bytea
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
    ends_at timestamp with time zone,
    unreadable text,
    unreadable_at timestamp with time zone
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
    destination text NOT NULL COLLATE pg_catalog."C",
    unreadable text,
    unreadable_at timestamp with time zone
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
INSERT INTO takeover.content VALUES (1, '{torn', '\x746f726e');
INSERT INTO takeover.content VALUES (2, '{torn', '\x73746f7265642d616e6577');
INSERT INTO takeover.content VALUES (3, '{torn', '\x64656c6976657265642d616e6577');
INSERT INTO takeover.content VALUES (50, '{"kind":"claimed"}', '\x636c61696d6564');
INSERT INTO takeover.content VALUES (13, '{torn', '\x746f726e');
INSERT INTO takeover.content VALUES (16, '{"NServiceBus.MessageId":"error-copy","NServiceBus.CorrelationId":"error-copy","NServiceBus.ConversationId":"error-copy","NServiceBus.MessageIntent":"Send","NServiceBus.TimeSent":"2026-11-29 11:54:54:367533 Z","NServiceBus.OriginatingEndpoint":"service","NServiceBus.OriginatingMachine":"machine","NServiceBus.ReplyToAddress":"service","NServiceBus.EnclosedMessageTypes":"__main__.Boom","NServiceBus.ContentType":"application/json","NServiceBus.FailedQ":"service","NServiceBus.TimeOfFailure":"2026-11-29 11:54:54:397721 Z","NServiceBus.ProcessingMachine":"machine","NServiceBus.ProcessingEndpoint":"service","$.diagnostics.hostid":"e5e61fb5d6855b509ba7acb6e6962ef3","$.diagnostics.hostdisplayname":"machine 31911","NServiceBus.ExceptionInfo.ExceptionType":"builtins.ValueError","NServiceBus.ExceptionInfo.Message":"it''s broken","NServiceBus.ExceptionInfo.Source":"builtins","NServiceBus.ExceptionInfo.StackTrace":"Traceback (most recent call last):\n  File \"/work/wt/S505/src/postdate/endpoint/handling.py\", line 332, in _handle\n    await self._call(received, context)\n  File \"/work/wt/S505/src/postdate/endpoint/handling.py\", line 376, in _call\n    await self.handlers.call(received, context)\n  File \"/work/wt/S505/src/postdate/endpoint/handling.py\", line 135, in call\n    waits_for = step(given)\n                ^^^^^^^^^^^\n  File \"/work/wt/S505/src/postdate/endpoint/handling.py\", line 166, in _call\n    await handle(message, context)\n  File \"/work/wt/S/tests/integration/takeover/make.py\", line 242, in fail\n    raise ValueError(message.text)\nValueError: it''s broken\n"}', '\x7b2274657874223a22697427732062726f6b656e227d');
INSERT INTO takeover.content VALUES (18, '{"kind":"moved"}', '\x6d6f766564');
INSERT INTO takeover.content VALUES (22, '{torn', '\x6d6f7665642d746f726e');
INSERT INTO takeover.content VALUES (24, '{torn', '\x73656e742d746f726e');
INSERT INTO takeover.content VALUES (26, '{"kind":"sent"}', '\x73656e74');
INSERT INTO takeover.content VALUES (27, '{}', '\x696e2d68616e64');
INSERT INTO takeover.content VALUES (28, '{"zone":"Europe/Paris","moved":"0","at":"2026-11-29T11:54:54.643648+00:00","version":"2026f"}', '\x5b22564670705a6a4941414141414141414141414141414141414141414141414141414141414141414141414141414141414141414141514141414145414141414141414141564670705a6a49414141414141414141414141414141414141414141414141414141414141414141414141414141426c414141414277414141422f2f2f2f2f2f61386d627a2f2f2f2f2f2b52594642502f2f2f2f2f3574486550442f2f2f2f2f6d39637363502f2f2f2f2b63764a46772f2f2f2f2f3533415350442f2f2f2f2f6e6f6e2b63502f2f2f2f2b666f4372772f2f2f2f2f3642677066442f2f2f2f2f6f59414d38502f2f2f2f2b694c684c772f2f2f2f2f364e365450442f2f2f2f2f7044574238502f2f2f2f2b6c58694e772f2f2f2f2f36596c4e66442f2f2f2f2f7079656238502f2f2f2f2b6f57435a772f2f2f2f2f366b486666442f2f2f2f2f7165343063502f2f2f2f2b7135312f772f2f2f2f2f3676585550442f2f2f2f2f724d644238502f2f2f2f2b74796166772f2f2f2f2f36366e492f442f2f2f2f2f7236425063502f2f2f2f2b77687758772f2f2f2f2f37474a612f442f2f2f2f2f736e416963502f2f2f2f2b7a636f68772f2f2f2f2f3752514248442f2f2f2f2f74556b7638502f2f2f2f2b324c2b5a772f2f2f2f2f3763795448442f2f2f2f2f75412f4963502f2f2f2f2b342f376c772f2f2f2f2f376e76716e442f2f2f2f2f75745a6738502f2f2f2f2b37324d62772f2f2f2f2f377a49742f442f2f2f2f2f7662696f38502f2f2f2f2b2b6e3139772f2f2f2f2f372b596976442f2f2f2f2f774a727738502f2f2f2f2f4265477a772f2f2f2f2f384a6f5866442f2f2f2f2f7731684f38502f2f2f2f2f45507756772f2f2f2f2f3855344d50442f2f2f2f2f786a715738502f2f2f2f2f48574b78772f2f2f2f2f3866614361442f2f2f2f2f7947776e34502f2f2f2f2f4d353073512f2f2f2f2f3832704635442f2f2f2f2f7a714a4445502f2f2f2f2f506b6a51512f2f2f2f2f3942503465442f2f2f2f2f30496e7838502f2f2f2f2f52636859512f2f2f2f2f394a4f514a41414141414143377335414141414141414d71787677414141414141326b5935414141414141446f736145414141414141506845575141414141414242304e704141414141414557516e6b41414141414153564269514141414141424e4e5242414141414141464450366b41414141414156492b75514141414141425954334a4141414141414677504e6b41414141414158383736514141414141426a6a723541414141414147644f676b414141414141617735475141414141414275387652414141414141484b797545414141414141646e4a3851414141414142364d6b424141414141414833794245414141414141676248495141414141414346635978414141414141496b7855454141414141416a5045555141414141414351734e684141414141414a52776e454141414141416d44426751414141414143634651354141414141414a2f55306b4141414141416f355357514141414141436e5646704141414141414b7355486b4141414141417274506951414141414143796b365a4141414141414c5a54616b41414141414175684d75514141414141433930764a4141414141414d4753746b4141414141417858646b5141514d434177494441674d434177494441674d434177494441674d434177494441674d434177494441674d434177494441674d434177494441674d434177494441674d434251514642415547416759454251514642415545425151464241554542515146424155454251514642415545425151464241554542515146424155454251514642415541414149784141414141414978414151414141345141516741414141414141304141413451414245414142776741525541414277674152704d545651415545315541466446553151415630565541454e465641424452564e554146644654565141436b4e4656433078513056545643784e4d7934314c6a4173545445774c6a55754d43387a43673d3d225d');
INSERT INTO takeover.content VALUES (29, '{"NServiceBus.MessageId":"k~00000001","NServiceBus.CorrelationId":"k~00000001","NServiceBus.ConversationId":"k~00000001","NServiceBus.MessageIntent":"Send","NServiceBus.TimeSent":"2026-11-29 11:54:54:668238 Z","NServiceBus.OriginatingEndpoint":"service","NServiceBus.OriginatingMachine":"machine","n":"1","Postdate.WallTime":"2099-03-28T09:00:00 Europe/Paris","NServiceBus.DeliverAt":"2099-03-28 08:00:00:000000 Z"}', '\x7365636f6e64');
INSERT INTO takeover.content VALUES (31, '{"kind":"held"}', '\x68656c64');
INSERT INTO takeover.content VALUES (32, '{"kind":"plain"}', '\x706c61696e');
INSERT INTO takeover.content VALUES (33, '{"kind":"é 🕰","quote":"it''s \"so\"\\","line":"a\nb"}', '\x776974682d68656164657273');
INSERT INTO takeover.content VALUES (34, '{"kind":"expiring"}', '\x6578706972696e67');
INSERT INTO takeover.content VALUES (35, '{"kind":"ü 🕰 it''s \"id\""}', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff');
INSERT INTO takeover.content VALUES (36, '{"kind":"large"}', '\x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff02030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff05060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff12131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff15161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff18191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff');
INSERT INTO takeover.content VALUES (37, '{"kind":"key~00000001"}', '\x6b65797e3030303030303031');
INSERT INTO takeover.content VALUES (38, '{"kind":"rescheduled"}', '\x72657363686564756c6564');
INSERT INTO takeover.content VALUES (48, '{"kind":"retried"}', '\x72657472696564');
INSERT INTO takeover.destination_limit OVERRIDING SYSTEM VALUE VALUES (1, 1, 'paused', '{"paused":true,"per_second":null,"windows":[]}', '2026-11-29 11:54:54.674165+00');
INSERT INTO takeover.destination_limit OVERRIDING SYSTEM VALUE VALUES (2, 1, 'mails', '{"paused":false,"per_second":2,"windows":["mon-fri 09:00-17:00 Europe/Paris"]}', '2026-11-29 11:54:54.680886+00');
INSERT INTO takeover.destination_limit OVERRIDING SYSTEM VALUE VALUES (3, 1, 'orders', '', '2026-11-29 11:54:54.692937+00');
INSERT INTO takeover.holder VALUES (1, 31911, 'machine', '2026-11-29 11:54:54.38281+00', false, '{error,orders,paused,service}', '9636794267b5e064', '2026-11-29 11:54:54.38316+00', '00:01:00', NULL);
INSERT INTO takeover.holder VALUES (2, 31911, 'machine', '2026-11-29 11:54:54.722278+00', false, '{}', '9636794267b5e064', '2026-11-29 11:54:54.722655+00', '00:01:00', NULL);
INSERT INTO takeover.migration VALUES ('', 1, 'initial');
INSERT INTO takeover.migration VALUES ('', 2, 'expiry in queues');
INSERT INTO takeover.migration VALUES ('', 3, 'quarantine');
INSERT INTO takeover.migration VALUES ('', 4, 'signs of life');
INSERT INTO takeover.migration VALUES ('', 5, 'destination limits');
INSERT INTO takeover.migration VALUES ('', 6, 'unreadable rows');
INSERT INTO takeover.migration VALUES ('service.timeouts', 1, 'initial');
INSERT INTO takeover.migration VALUES ('service.timeouts', 2, 'postponed');
INSERT INTO takeover.migration VALUES ('service.timeouts', 3, 'keys');
INSERT INTO takeover.migration VALUES ('service.timeouts', 4, 'unreadable rows');
INSERT INTO takeover.migration VALUES ('other', 1, 'initial');
INSERT INTO takeover.migration VALUES ('other', 2, 'postponed');
INSERT INTO takeover.migration VALUES ('other', 3, 'keys');
INSERT INTO takeover.migration VALUES ('other', 4, 'unreadable rows');
INSERT INTO takeover.migration VALUES ('saga', 1, 'initial');
INSERT INTO takeover.migration VALUES ('outbox', 1, 'initial');
INSERT INTO takeover.other VALUES (13, '2026-01-31 12:00:00+00', NULL, NULL, NULL, 0, 'torn', 'orders', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-01-31 12:00:01+00');
INSERT INTO takeover.outbox VALUES ('service', 'undispatched', '2026-01-31 12:00:00+00', NULL, '\x82a776657273696f6e01aa6f7065726174696f6e739284ab64657374696e6174696f6ea66f7264657273aa6d6573736167655f6964ae756e646973706174636865642d31a76865616465727381a46b696e64a2c3a9a4626f6479c404006e6f7786ab64657374696e6174696f6ea66f7264657273aa6d6573736167655f6964ae756e646973706174636865642d32a76865616465727381a46b696e64ae756e646973706174636865642d32a4626f6479c40e756e646973706174636865642d32a764656c61796564c3a3647565cf000649aeaadcd400');
INSERT INTO takeover.outbox VALUES ('service', 'dispatched', '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', NULL);
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (1, 'orders');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (2, 'paused');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (3, 'service');
INSERT INTO takeover.queue OVERRIDING SYSTEM VALUE VALUES (4, 'error');
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (4, 2, 16, NULL, NULL, NULL, 0, NULL, 'error-copy', NULL, NULL, NULL);
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (-1, 5, 22, '2026-01-31 12:00:00+00', NULL, NULL, 0, 1, 'moved-torn', NULL, 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-11-29 11:54:54.478205+00');
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (-1, 6, 24, NULL, NULL, NULL, 0, NULL, 'sent-torn', NULL, 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-11-29 11:54:54.478288+00');
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (1, 4, 18, '2026-01-31 12:00:00+00', NULL, NULL, 1, 1, 'moved', NULL, NULL, NULL);
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (1, 7, 26, NULL, NULL, NULL, 0, NULL, 'sent', '2126-11-30 11:54:54.482797+00', NULL, NULL);
INSERT INTO takeover.queue_message OVERRIDING SYSTEM VALUE VALUES (2, 8, 27, NULL, NULL, 1, 0, NULL, 'in-hand', NULL, NULL, NULL);
INSERT INTO takeover.record VALUES (1, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (2, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'stored-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (3, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'delivered-anew', 'orders', NULL);
INSERT INTO takeover.record VALUES (4, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'no-content', 'orders', NULL);
INSERT INTO takeover.record VALUES (5, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (6, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'stored-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (7, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'delivered-anew', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (8, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 7, 'no-content', 'orders', 'unreadable: the headers and the body are gone');
INSERT INTO takeover.record VALUES (13, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 2, 1, 'torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (14, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 2, 7, 'torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (17, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (18, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'moved', 'orders', NULL);
INSERT INTO takeover.record VALUES (19, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (20, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'moved', 'orders', NULL);
INSERT INTO takeover.record VALUES (21, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 3, 'handled', 'orders', NULL);
INSERT INTO takeover.record VALUES (22, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'moved-torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (23, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 2, 'moved-torn', 'orders', NULL);
INSERT INTO takeover.record VALUES (25, '2026-11-29 11:54:54.478298+00', '2026-01-31 12:00:00+00', 1, 7, 'moved-torn', 'orders', 'unreadable: headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)');
INSERT INTO takeover.record VALUES (28, '2026-11-29 11:54:54.643648+00', '9999-12-31 23:59:59.999999+00', 1, 1, 'postdate~Europe/Paris~00000001', 'postdate.zones', 'under a key');
INSERT INTO takeover.record VALUES (29, '2026-11-29 11:54:54.657881+00', '2099-03-28 08:00:00+00', 1, 1, 'k~00000001', 'mails', 'under a key');
INSERT INTO takeover.record VALUES (30, '2026-11-29 11:54:54.668238+00', '2099-03-28 08:00:00+00', 1, 8, 'k~00000001', 'mails', 'replaced');
INSERT INTO takeover.record VALUES (31, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'held', 'paused', NULL);
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
INSERT INTO takeover.record VALUES (48, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'retried', 'orders', NULL);
INSERT INTO takeover.record VALUES (49, '2026-01-31 12:00:01+00', '2026-01-31 12:00:00+00', 1, 4, 'retried', 'orders', 'no route');
INSERT INTO takeover.record VALUES (50, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', 1, 1, 'claimed', 'orders', NULL);
INSERT INTO takeover.saga VALUES ('id-1', 'Order', 'order_id', 'o-1 é', 2, '{"n":2}', '{"timeouts":{}}');
INSERT INTO takeover."service.timeouts" VALUES (1, '2026-01-31 12:00:00+00', NULL, NULL, NULL, 0, 'torn', 'orders', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-01-31 12:00:01+00');
INSERT INTO takeover."service.timeouts" VALUES (2, '2026-01-31 12:00:00+00', NULL, NULL, NULL, 0, 'stored-anew', 'orders', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-01-31 12:00:01+00');
INSERT INTO takeover."service.timeouts" VALUES (3, '2026-01-31 12:00:00+00', NULL, NULL, NULL, 0, 'delivered-anew', 'orders', 'headers must be a JSON object of texts, not ''{torn'': JSON is malformed: object keys must be strings (byte 1)', '2026-01-31 12:00:01+00');
INSERT INTO takeover."service.timeouts" VALUES (4, '2026-01-31 12:00:00+00', NULL, NULL, NULL, 0, 'no-content', 'orders', 'the headers and the body are gone', '2026-01-31 12:00:01+00');
INSERT INTO takeover."service.timeouts" VALUES (28, '9999-12-31 23:59:59.999999+00', '9999-12-31 23:59:59.999999+00', NULL, NULL, 0, 'postdate~Europe/Paris~00000001', 'postdate.zones', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (29, '2099-03-28 08:00:00+00', '2099-03-28 08:00:00+00', NULL, NULL, 0, 'k~00000001', 'mails', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (31, '2026-01-31 12:00:00+00', '9000-01-01 00:18:32.243+00', NULL, NULL, 0, 'held', 'paused', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (32, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'plain', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (33, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'with-headers', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (34, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', '2126-02-01 12:00:00+00', NULL, 0, 'expiring', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (35, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'ü 🕰 it''s "id"', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (36, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'large', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (37, '2026-01-31 13:00:00+00', '2026-01-31 13:00:00+00', NULL, NULL, 0, 'key~00000001', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (38, '2026-01-31 14:00:00+00', '2026-01-31 14:00:00+00', NULL, NULL, 0, 'rescheduled', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (48, '2026-01-31 12:00:00+00', '2026-01-31 15:00:00+00', NULL, NULL, 1, 'retried', 'orders', NULL, NULL);
INSERT INTO takeover."service.timeouts" VALUES (50, '2026-01-31 12:00:00+00', '2026-01-31 12:00:00+00', NULL, NULL, 0, 'claimed', 'orders', NULL, NULL);
INSERT INTO takeover."service_TimeoutData" VALUES ('00000000-0000-4000-8000-000000000001', 'orders', '00000000-0000-0000-0000-000000000000', '\x74696d656f75742031', '2026-01-31 12:00:00', '{"kind":"\u00e9"}', '1.0.0.0');
INSERT INTO takeover."service_TimeoutData" VALUES ('00000000-0000-4000-8000-000000000002', 'orders', '00000000-0000-4000-8000-00000000000a', '\x74696d656f75742032', '2026-02-01 12:00:00', '{"kind":"\u00e9"}', '1.0.0.0');
INSERT INTO takeover.store OVERRIDING SYSTEM VALUE VALUES (1, 'service.timeouts');
INSERT INTO takeover.store OVERRIDING SYSTEM VALUE VALUES (2, 'other');
SELECT pg_catalog.setval('takeover.destination_limit_lane_seq', 3, true);
SELECT pg_catalog.setval('takeover.holder_number', 2, true);
SELECT pg_catalog.setval('takeover.number', 50, true);
SELECT pg_catalog.setval('takeover.queue_message_number_seq', 8, true);
SELECT pg_catalog.setval('takeover.queue_queue_id_seq', 6, true);
SELECT pg_catalog.setval('takeover.store_store_id_seq', 2, true);
ALTER TABLE ONLY takeover.content
    ADD CONSTRAINT content_pkey PRIMARY KEY (number);
ALTER TABLE ONLY takeover.destination_limit
    ADD CONSTRAINT destination_limit_pkey PRIMARY KEY (lane);
ALTER TABLE ONLY takeover.destination_limit
    ADD CONSTRAINT destination_limit_store_destination_key UNIQUE (store, destination);
ALTER TABLE ONLY takeover.holder
    ADD CONSTRAINT holder_pkey PRIMARY KEY (holder);
ALTER TABLE ONLY takeover.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (subject, version);
ALTER TABLE ONLY takeover.other
    ADD CONSTRAINT other_pkey PRIMARY KEY (number);
ALTER TABLE ONLY takeover.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (endpoint, message_id);
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
CREATE INDEX other_due_number_idx ON takeover.other USING btree (due, number) WHERE (attempt_at <> due);
CREATE INDEX other_holder_idx ON takeover.other USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX other_number_idx ON takeover.other USING btree (number) WHERE (unreadable IS NOT NULL);
CREATE INDEX outbox_dispatched ON takeover.outbox USING btree (endpoint, dispatched_at) WHERE (dispatched_at IS NOT NULL);
CREATE INDEX queue_message_ends ON takeover.queue_message USING btree (ends_at) WHERE ((ends_at IS NOT NULL) AND (holder IS NULL));
CREATE INDEX queue_message_held ON takeover.queue_message USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX queue_message_unreadable ON takeover.queue_message USING btree (number) WHERE (unreadable IS NOT NULL);
CREATE INDEX record_delivered ON takeover.record USING brin (due) WITH (pages_per_range='32', autosummarize='on') WHERE (kind = ANY (ARRAY[2, 3]));
CREATE INDEX record_number ON takeover.record USING brin (number) WITH (pages_per_range='32', autosummarize='on');
CREATE INDEX record_other ON takeover.record USING btree (message_id) WHERE (kind > 3);
CREATE UNIQUE INDEX record_scheduled ON takeover.record USING btree (message_id, store_id) WHERE (kind = 1);
CREATE INDEX "service.timeouts_attempt_at_number_idx" ON takeover."service.timeouts" USING btree (attempt_at, number);
CREATE INDEX "service.timeouts_due_idx" ON takeover."service.timeouts" USING btree (due) WHERE (failures > 0);
CREATE INDEX "service.timeouts_due_number_idx" ON takeover."service.timeouts" USING btree (due, number) WHERE (attempt_at <> due);
CREATE INDEX "service.timeouts_holder_idx" ON takeover."service.timeouts" USING btree (holder) WHERE (holder IS NOT NULL);
CREATE INDEX "service.timeouts_number_idx" ON takeover."service.timeouts" USING btree (number) WHERE (unreadable IS NOT NULL);
CREATE INDEX "service_TimeoutData_SagaId_idx" ON takeover."service_TimeoutData" USING btree ("SagaId");
CREATE INDEX "service_TimeoutData_Time_idx" ON takeover."service_TimeoutData" USING btree ("Time");
