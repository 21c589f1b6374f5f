BEGIN TRANSACTION;
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stamp TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    meta TEXT NOT NULL
);
INSERT INTO "checkpoint" VALUES('tinker://s-5559b1d44d3543ec93d8974447294ba3:train:0/weights/a','s-5559b1d44d3543ec93d8974447294ba3:train:0','2410140 1795444112533249952 930',643985,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:28:32.513542+00:00", "ttl_seconds": 7200, "public": false, "run_metadata": {"renderer_name": "qwen3"}}');
INSERT INTO "checkpoint" VALUES('tinker://s-5559b1d44d3543ec93d8974447294ba3:train:0/sampler_weights/b','s-5559b1d44d3543ec93d8974447294ba3:train:0','2410147 1795444112564670163 794',220289,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "sampler_weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:28:32.547452+00:00", "ttl_seconds": null, "public": false, "run_metadata": {"renderer_name": "qwen3"}}');
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    session TEXT,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL
);
INSERT INTO "run" VALUES('s-5559b1d44d3543ec93d8974447294ba3:train:0','s-5559b1d44d3543ec93d8974447294ba3','tiny',4,'{"renderer_name": "qwen3"}','2026-11-23T14:28:31.835636+00:00');
INSERT INTO "run" VALUES('s-3bb49d080eb6452b94a077990f052c12:train:0','s-3bb49d080eb6452b94a077990f052c12','tiny',2,'{}','2026-11-23T14:28:33.149136+00:00');
CREATE TABLE sampler (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT
);
INSERT INTO "sampler" VALUES('s-5559b1d44d3543ec93d8974447294ba3:sample:0','s-5559b1d44d3543ec93d8974447294ba3','tiny','tinker://s-5559b1d44d3543ec93d8974447294ba3:train:0/sampler_weights/b');
CREATE TABLE session (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    display_name TEXT,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL,
    finish TEXT
);
INSERT INTO "session" VALUES('s-5559b1d44d3543ec93d8974447294ba3','2155f41b43c94054f9fc7b7583f82c78','red bird','{"who": "me", "note": "gr\u00f6\u00dfer \ud83d\ude42"}','2026-11-23T14:28:31.805912+00:00','{"reason": {"type": "success"}, "detail": null}');
INSERT INTO "session" VALUES('s-3bb49d080eb6452b94a077990f052c12','2155f41b43c94054f9fc7b7583f82c78',NULL,'{"who": "you"}','2026-11-23T14:28:33.095731+00:00',NULL);
CREATE INDEX session_owner ON session (owner);
CREATE INDEX run_session ON run (session);
CREATE INDEX sampler_session ON sampler (session);
CREATE INDEX checkpoint_run ON checkpoint (run);
COMMIT;
PRAGMA user_version = 1;
