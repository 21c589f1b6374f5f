BEGIN TRANSACTION;
CREATE TABLE checkpoint (
    path TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    stamp TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    meta TEXT NOT NULL
);
INSERT INTO "checkpoint" VALUES('tinker://s-415fcc01cce34201a5e62f80105d3f99:train:0/weights/a','s-415fcc01cce34201a5e62f80105d3f99:train:0','2361603 1795444127696860341 1795444127696860341 950',644005,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:28:47.659959+00:00", "ttl_seconds": 7200, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
INSERT INTO "checkpoint" VALUES('tinker://s-415fcc01cce34201a5e62f80105d3f99:train:0/sampler_weights/b','s-415fcc01cce34201a5e62f80105d3f99:train:0','2410154 1795444127728162742 1795444127728162742 814',220309,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "sampler_weights", "step": 3, "user_metadata": {}, "created": "2026-11-23T14:28:47.716349+00:00", "ttl_seconds": null, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": []}');
CREATE TABLE history_run (
        run TEXT PRIMARY KEY, seen REAL NOT NULL, about TEXT NOT NULL);
INSERT INTO "history_run" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',1.79544412794753956794e+09,'{"rank": 4, "seed": "1", "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "base": "tiny", "user_metadata": {"renderer_name": "qwen3"}, "session": "s-415fcc01cce34201a5e62f80105d3f99", "created": 1795444127.2786527, "loss": "cross_entropy", "loss_config": {}, "tokens": 12, "drawn": 0, "seconds": 0.3091232010001477, "last": {"step": 2, "at": 1795444127.5877757, "seconds": 0.04387490399994931, "split": {"optimizer": 0.000619077000010293, "forward_backward": 0.0021943000001556356, "saving": 0.0, "sampling": 0.0, "waiting": 0.00689148599985856, "client": 0.03417004099992482}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 23.498919010162354}, "forward": {}, "kl": null, "loss_mean": 5.874729752540588, "loss": "cross_entropy", "optimizer": {"grad_norm": 71.83969492096074, "grad_norm_clipped": 71.83969492096074, "weight_norm": 6.24552018198491, "loss": 23.498919010162354, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}, "steps": 3, "spark": [6.968138217926025, 6.333968877792358, 5.874729752540588], "spark_stride": 1}');
INSERT INTO "history_run" VALUES('s-ac6512bbf95b474ab4f3e945ae9fbdd5:train:0',1.79544412841385841363e+09,'{"rank": 2, "seed": "4463559063507481290", "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "base": "tiny", "user_metadata": {}, "session": "s-ac6512bbf95b474ab4f3e945ae9fbdd5", "created": 1795444128.39614}');
CREATE TABLE history_sample (
        run TEXT NOT NULL, place INTEGER NOT NULL, row TEXT NOT NULL, PRIMARY KEY (run, place));
INSERT INTO "history_sample" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',24,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.7404, -6.2728, -7.5835, -6.2758], "step": 0, "at": 1795444127.456711, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',25,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.4331, -5.3104, -7.0852, -5.5072], "step": 1, "at": 1795444127.5084624, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',26,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-7.0536, -5.0309, -6.94, -4.4744], "step": 2, "at": 1795444127.5611126, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',0,'{"kind": "sample", "step": 0, "at": 1795444127.8049212, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [1039, 577, 305, 327], "cut": 0, "student": [-7.0399, -6.6636, -7.3091, -8.0231], "stop": "length", "temperature": 1.0}');
INSERT INTO "history_sample" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0',1,'{"kind": "sample", "step": 0, "at": 1795444127.8049212, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [521, 13, 535, 894], "cut": 0, "student": [-7.3214, -5.4356, -0.772, -7.6666], "stop": "length", "temperature": 1.0}');
CREATE TABLE history_step (
        place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, step INTEGER NOT NULL,
        row TEXT NOT NULL, UNIQUE (run, step));
INSERT INTO "history_step" VALUES(1,'s-415fcc01cce34201a5e62f80105d3f99:train:0',0,'{"step": 0, "at": 1795444127.4838657, "seconds": 0.20521238500032268, "split": {"optimizer": 0.000497819999964122, "forward_backward": 0.020252403000085906, "saving": 0.029701460000069346, "sampling": 0.0, "waiting": 0.018330812000840524, "client": 0.13642988999936279}, "calls": {"create": 1, "forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 27.8725528717041}, "forward": {}, "kl": null, "loss_mean": 6.968138217926025, "loss": "cross_entropy", "optimizer": {"grad_norm": 66.49497096605083, "grad_norm_clipped": 66.49497096605083, "weight_norm": 6.2136722850837405, "loss": 27.8725528717041, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(2,'s-415fcc01cce34201a5e62f80105d3f99:train:0',1,'{"step": 1, "at": 1795444127.543901, "seconds": 0.06003591199987568, "split": {"optimizer": 0.0005619300000034855, "forward_backward": 0.0020801059999939753, "saving": 0.0, "sampling": 0.0, "waiting": 0.018442791999859764, "client": 0.038951084000018454}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 25.335875511169434}, "forward": {}, "kl": null, "loss_mean": 6.333968877792358, "loss": "cross_entropy", "optimizer": {"grad_norm": 55.65732834581539, "grad_norm_clipped": 55.65732834581539, "weight_norm": 6.228464496768722, "loss": 25.335875511169434, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(3,'s-415fcc01cce34201a5e62f80105d3f99:train:0',2,'{"step": 2, "at": 1795444127.5877757, "seconds": 0.04387490399994931, "split": {"optimizer": 0.000619077000010293, "forward_backward": 0.0021943000001556356, "saving": 0.0, "sampling": 0.0, "waiting": 0.00689148599985856, "client": 0.03417004099992482}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 23.498919010162354}, "forward": {}, "kl": null, "loss_mean": 5.874729752540588, "loss": "cross_entropy", "optimizer": {"grad_norm": 71.83969492096074, "grad_norm_clipped": 71.83969492096074, "weight_norm": 6.24552018198491, "loss": 23.498919010162354, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
CREATE TABLE run (
    id TEXT PRIMARY KEY,
    session TEXT,
    base_model TEXT NOT NULL,
    rank INTEGER NOT NULL,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL
);
INSERT INTO "run" VALUES('s-415fcc01cce34201a5e62f80105d3f99:train:0','s-415fcc01cce34201a5e62f80105d3f99','tiny',4,'{"renderer_name": "qwen3"}','2026-11-23T14:28:47.278121+00:00');
INSERT INTO "run" VALUES('s-ac6512bbf95b474ab4f3e945ae9fbdd5:train:0','s-ac6512bbf95b474ab4f3e945ae9fbdd5','tiny',2,'{}','2026-11-23T14:28:48.393351+00:00');
CREATE TABLE sampler (
    id TEXT PRIMARY KEY,
    session TEXT NOT NULL,
    base_model TEXT NOT NULL,
    path TEXT
);
INSERT INTO "sampler" VALUES('s-415fcc01cce34201a5e62f80105d3f99:sample:0','s-415fcc01cce34201a5e62f80105d3f99','tiny','tinker://s-415fcc01cce34201a5e62f80105d3f99:train:0/sampler_weights/b');
CREATE TABLE session (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    display_name TEXT,
    user_metadata TEXT NOT NULL,
    created TEXT NOT NULL,
    finish TEXT
);
INSERT INTO "session" VALUES('s-415fcc01cce34201a5e62f80105d3f99','2155f41b43c94054f9fc7b7583f82c78','red bird','{"who": "me", "note": "gr\u00f6\u00dfer \ud83d\ude42"}','2026-11-23T14:28:47.144027+00:00','{"reason": {"type": "success"}, "detail": null}');
INSERT INTO "session" VALUES('s-ac6512bbf95b474ab4f3e945ae9fbdd5','2155f41b43c94054f9fc7b7583f82c78',NULL,'{"who": "you"}','2026-11-23T14:28:48.377239+00:00',NULL);
CREATE INDEX session_owner ON session (owner);
CREATE INDEX run_session ON run (session);
CREATE INDEX sampler_session ON sampler (session);
CREATE INDEX checkpoint_run ON checkpoint (run);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('history_step',3);
COMMIT;
PRAGMA user_version = 1;
