BEGIN TRANSACTION;
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stamp TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    meta TEXT NOT NULL
);
INSERT INTO "checkpoint" VALUES('tinker://s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0/weights/a','s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0','2508042 1795444709700815926 1795444709700815926 950',644005,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:38:29.685032+00:00", "ttl_seconds": 7200, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
INSERT INTO "checkpoint" VALUES('tinker://s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0/sampler_weights/b','s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0','2508047 1795444709732326744 1795444709732326744 814',220309,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "sampler_weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:38:29.712152+00:00", "ttl_seconds": null, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
CREATE TABLE history_run (
        run TEXT PRIMARY KEY, seen REAL NOT NULL, about TEXT NOT NULL);
INSERT INTO "history_run" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',1.79544470992476868633e+09,'{"rank": 4, "seed": 1, "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "base": "tiny", "user_metadata": {"renderer_name": "qwen3"}, "session": "s-f6a5d0e4acb04c1b85b02566bfe7032b", "created": 1795444709.433795, "loss": "cross_entropy", "loss_config": {}, "tokens": 12, "drawn": 0, "seconds": 0.24031744100011565, "last": {"step": 2, "at": 1795444709.6741123, "seconds": 0.044571492999693874, "split": {"optimizer": 0.001526401999853988, "forward_backward": 0.002269700999931956, "saving": 0.0, "sampling": 0.0, "waiting": 0.0005472199995892879, "client": 0.04022817000031864}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 23.498919010162354}, "forward": {}, "kl": null, "loss": "cross_entropy", "optimizer": {"grad_norm": 71.83969492096074, "grad_norm_clipped": 71.83969492096074, "weight_norm": 6.24552018198491, "loss": 23.498919010162354, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}, "steps": 3, "spark": [6.968138217926025, 6.333968877792358, 5.874729752540588], "spark_stride": 1}');
INSERT INTO "history_run" VALUES('s-8d9bebc31bd14e24beccc5bfab4b3d53:train:0',1.79544471034225273128e+09,'{"rank": 2, "seed": 8729462302254973646, "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "base": "tiny", "user_metadata": {}, "session": "s-8d9bebc31bd14e24beccc5bfab4b3d53", "created": 1795444710.3365989}');
CREATE TABLE history_sample (
        run TEXT NOT NULL, place INTEGER NOT NULL, row TEXT NOT NULL, PRIMARY KEY (run, place));
INSERT INTO "history_sample" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',24,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.7404, -6.2728, -7.5835, -6.2758], "step": 0, "at": 1795444709.5532467, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',25,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.4331, -5.3104, -7.0852, -5.5072], "step": 1, "at": 1795444709.6089685, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',26,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.0536, -5.0309, -6.94, -4.4744], "step": 2, "at": 1795444709.6584404, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',0,'{"kind": "sample", "step": 0, "at": 1795444709.8181481, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [1039, 577, 305, 327], "cut": 0, "student": [-7.0399, -6.6636, -7.3091, -8.0231], "stop": "length", "temperature": 1.0}');
INSERT INTO "history_sample" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',1,'{"kind": "sample", "step": 0, "at": 1795444709.8181481, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [521, 13, 535, 894], "cut": 0, "student": [-7.3214, -5.4356, -0.772, -7.6666], "stop": "length", "temperature": 1.0}');
CREATE TABLE history_step (
        place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, step INTEGER NOT NULL,
        row TEXT NOT NULL, UNIQUE (run, step));
INSERT INTO "history_step" VALUES(1,'s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',0,'{"step": 0, "at": 1795444709.5839596, "seconds": 0.15016467600025862, "split": {"optimizer": 0.00048582799990981584, "forward_backward": 0.01997008599983019, "saving": 0.08562327399977221, "sampling": 0.0, "waiting": 0.008963169000708149, "client": 0.03512231900003826}, "calls": {"create": 1, "forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 27.8725528717041}, "forward": {}, "kl": null, "loss": "cross_entropy", "optimizer": {"grad_norm": 66.49497096605083, "grad_norm_clipped": 66.49497096605083, "weight_norm": 6.2136722850837405, "loss": 27.8725528717041, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(2,'s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',1,'{"step": 1, "at": 1795444709.629541, "seconds": 0.04558127200016315, "split": {"optimizer": 0.0005449680002129753, "forward_backward": 0.002160597000056441, "saving": 0.0, "sampling": 0.0, "waiting": 0.0028645729998970637, "client": 0.04001113399999667}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 25.335875511169434}, "forward": {}, "kl": null, "loss": "cross_entropy", "optimizer": {"grad_norm": 55.65732834581539, "grad_norm_clipped": 55.65732834581539, "weight_norm": 6.228464496768722, "loss": 25.335875511169434, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(3,'s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0',2,'{"step": 2, "at": 1795444709.6741123, "seconds": 0.044571492999693874, "split": {"optimizer": 0.001526401999853988, "forward_backward": 0.002269700999931956, "saving": 0.0, "sampling": 0.0, "waiting": 0.0005472199995892879, "client": 0.04022817000031864}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 23.498919010162354}, "forward": {}, "kl": null, "loss": "cross_entropy", "optimizer": {"grad_norm": 71.83969492096074, "grad_norm_clipped": 71.83969492096074, "weight_norm": 6.24552018198491, "loss": 23.498919010162354, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    session TEXT,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL
);
INSERT INTO "run" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0','s-f6a5d0e4acb04c1b85b02566bfe7032b','tiny',4,'{"renderer_name": "qwen3"}','2026-11-23T14:38:29.433090+00:00');
INSERT INTO "run" VALUES('s-8d9bebc31bd14e24beccc5bfab4b3d53:train:0','s-8d9bebc31bd14e24beccc5bfab4b3d53','tiny',2,'{}','2026-11-23T14:38:30.336020+00:00');
CREATE TABLE sampler (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT
);
INSERT INTO "sampler" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b:sample:0','s-f6a5d0e4acb04c1b85b02566bfe7032b','tiny','tinker://s-f6a5d0e4acb04c1b85b02566bfe7032b:train:0/sampler_weights/b');
CREATE TABLE session (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    display_name TEXT,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL,
    finish TEXT
);
INSERT INTO "session" VALUES('s-f6a5d0e4acb04c1b85b02566bfe7032b','2155f41b43c94054f9fc7b7583f82c78','red bird','{"who": "me", "note": "gr\u00f6\u00dfer \ud83d\ude42"}','2026-11-23T14:38:29.394060+00:00','{"reason": {"type": "success"}, "detail": null}');
INSERT INTO "session" VALUES('s-8d9bebc31bd14e24beccc5bfab4b3d53','2155f41b43c94054f9fc7b7583f82c78',NULL,'{"who": "you"}','2026-11-23T14:38:30.320870+00:00',NULL);
CREATE INDEX session_owner ON session (owner);
CREATE INDEX run_session ON run (session);
CREATE INDEX sampler_session ON sampler (session);
CREATE INDEX checkpoint_run ON checkpoint (run);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('history_step',3);
COMMIT;
PRAGMA user_version = 1;
