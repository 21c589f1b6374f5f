BEGIN TRANSACTION;
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stamp TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    meta TEXT NOT NULL
);
INSERT INTO "checkpoint" VALUES('tinker://s-2bc589544f2f45f490df874d3b73d96c:train:0/weights/a','s-2bc589544f2f45f490df874d3b73d96c:train:0','2417208 1795444372857045836 1795444372857045836 950',644005,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:32:52.824520+00:00", "ttl_seconds": 7200, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
INSERT INTO "checkpoint" VALUES('tinker://s-2bc589544f2f45f490df874d3b73d96c:train:0/sampler_weights/b','s-2bc589544f2f45f490df874d3b73d96c:train:0','2417427 1795444372914728551 1795444372914728551 814',220309,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "sampler_weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:32:52.871587+00:00", "ttl_seconds": null, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    session TEXT,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL
);
INSERT INTO "run" VALUES('s-2bc589544f2f45f490df874d3b73d96c:train:0','s-2bc589544f2f45f490df874d3b73d96c','tiny',4,'{"renderer_name": "qwen3"}','2026-11-23T14:32:52.594036+00:00');
INSERT INTO "run" VALUES('s-8e01bc8685ab4de1a1bda36e819c66d5:train:0','s-8e01bc8685ab4de1a1bda36e819c66d5','tiny',2,'{}','2026-11-23T14:32:53.756275+00:00');
CREATE TABLE sampler (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT
);
INSERT INTO "sampler" VALUES('s-2bc589544f2f45f490df874d3b73d96c:sample:0','s-2bc589544f2f45f490df874d3b73d96c','tiny','tinker://s-2bc589544f2f45f490df874d3b73d96c:train:0/sampler_weights/b');
CREATE TABLE session (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    display_name TEXT,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL,
    finish TEXT
);
INSERT INTO "session" VALUES('s-2bc589544f2f45f490df874d3b73d96c','2155f41b43c94054f9fc7b7583f82c78','red bird','{"who": "me", "note": "gr\u00f6\u00dfer \ud83d\ude42"}','2026-11-23T14:32:52.532650+00:00','{"reason": {"type": "success"}, "detail": null}');
INSERT INTO "session" VALUES('s-8e01bc8685ab4de1a1bda36e819c66d5','2155f41b43c94054f9fc7b7583f82c78',NULL,'{"who": "you"}','2026-11-23T14:32:53.736851+00:00',NULL);
CREATE INDEX session_owner ON session (owner);
CREATE INDEX run_session ON run (session);
CREATE INDEX sampler_session ON sampler (session);
CREATE INDEX checkpoint_run ON checkpoint (run);
COMMIT;
PRAGMA user_version = 1;
