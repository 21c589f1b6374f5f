BEGIN TRANSACTION;
CREATE TABLE checkpoint (
            path TEXT PRIMARY KEY,
            run TEXT NOT NULL,
            stamp TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            meta TEXT NOT NULL);
INSERT INTO "checkpoint" VALUES('tinker://s-0176214f5bde4fddb39fc51eabd6c05e:train:0/weights/a','s-0176214f5bde4fddb39fc51eabd6c05e:train:0','2188680 1795816017133135468 1795816017133135468 974',646477,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "weights", "step": 3, "user_metadata": {}, "created": "2026-11-27T21:46:57.110707+00:00", "ttl_seconds": 7200, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": [], "optimizer": "adamw"}');
INSERT INTO "checkpoint" VALUES('tinker://s-0176214f5bde4fddb39fc51eabd6c05e:train:0/sampler_weights/b','s-0176214f5bde4fddb39fc51eabd6c05e:train:0','2189323 1795816017156629310 1795816017156629310 838',221149,'{"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "attn": true, "mlp": true, "unembed": true, "kind": "sampler_weights", "step": 3, "user_metadata": {}, "created": "2026-11-27T21:46:57.147992+00:00", "ttl_seconds": null, "public": false, "run_metadata": {"renderer_name": "qwen3"}, "recipients": [], "optimizer": "adamw"}');
CREATE TABLE history_run (
            run TEXT PRIMARY KEY, seen REAL NOT NULL, about TEXT NOT NULL);
INSERT INTO "history_run" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',1.79581601725794792173e+09,'{"rank": 4, "seed": "1", "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "optimizer": "adamw", "base": "tiny", "user_metadata": {"renderer_name": "qwen3"}, "session": "s-0176214f5bde4fddb39fc51eabd6c05e", "created": 1795816016.9843302, "loss": "cross_entropy", "loss_config": {}, "tokens": 12, "drawn": 0, "seconds": 0.12027565300013521, "last": {"step": 2, "at": 1795816017.104606, "seconds": 0.033873264999783714, "split": {"optimizer": 0.00012175099982414395, "forward_backward": 0.001993523999772151, "saving": 0.0, "sampling": 0.0, "waiting": 0.0004915920017083408, "client": 0.03126639799847908}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 29.90957021713257}, "forward": {}, "kl": null, "loss_mean": 7.477392554283142, "loss": "cross_entropy", "optimizer": {"grad_norm": 68.57420291279176, "grad_norm_clipped": 68.57420291279176, "weight_norm": 6.243997455598471, "loss": 29.90957021713257, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"type": "adamw", "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}, "adam": {"type": "adamw", "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}, "steps": 3, "spark": [9.901080012321472, 8.791839003562927, 7.477392554283142], "spark_stride": 1}');
INSERT INTO "history_run" VALUES('s-ef44861aa45f45809dc3ef138555de03:train:0',1795816017.55123,'{"rank": 2, "seed": "8096740289999887241", "attn": true, "mlp": true, "unembed": true, "alpha": 32.0, "optimizer": "adamw", "base": "tiny", "user_metadata": {}, "session": "s-ef44861aa45f45809dc3ef138555de03", "created": 1795816017.5390623}');
CREATE TABLE history_sample (
            run TEXT NOT NULL, place INTEGER NOT NULL, row TEXT NOT NULL,
            PRIMARY KEY (run, place));
INSERT INTO "history_sample" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',24,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-13.9905, -6.4971, -12.5126, -6.6041], "step": 0, "at": 1795816017.0355663, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',25,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-12.4607, -6.284, -10.5738, -5.8488], "step": 1, "at": 1795816017.0561075, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',26,'{"kind": "datum", "prompt": [11], "prompt_cut": 0, "cut": 0, "live": [true, true, true, true], "ids": [12, 13, 14, 15], "student": [-10.1879, -6.3242, -8.0865, -5.3109], "step": 2, "at": 1795816017.0903158, "base": "tiny", "loss": "cross_entropy"}');
INSERT INTO "history_sample" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',0,'{"kind": "sample", "step": 0, "at": 1795816017.1930466, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [1097, 885, 217, 104], "cut": 0, "student": [-6.6999, -6.8999, -7.2292, -6.762], "stop": "length", "temperature": 1.0}');
INSERT INTO "history_sample" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0',1,'{"kind": "sample", "step": 0, "at": 1795816017.1930466, "base": "tiny", "prompt": [11, 12, 13, 14], "prompt_cut": 0, "ids": [548, 8, 351, 939], "cut": 0, "student": [-6.6705, -6.9738, -6.6834, -6.6903], "stop": "length", "temperature": 1.0}');
CREATE TABLE history_step (
            place INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, step INTEGER NOT NULL,
            row TEXT NOT NULL, UNIQUE (run, step));
INSERT INTO "history_step" VALUES(1,'s-0176214f5bde4fddb39fc51eabd6c05e:train:0',0,'{"step": 0, "at": 1795816017.0507865, "seconds": 0.06645620099880034, "split": {"optimizer": 0.0001164029999927152, "forward_backward": 0.014069369999560877, "saving": 0.01778470299905166, "sampling": 0.0, "waiting": 0.0024174829995899927, "client": 0.032068242000605096}, "calls": {"create": 1, "forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 39.60432004928589}, "forward": {}, "kl": null, "loss_mean": 9.901080012321472, "loss": "cross_entropy", "optimizer": {"grad_norm": 80.16870412542727, "grad_norm_clipped": 80.16870412542727, "weight_norm": 6.213688700472084, "loss": 39.60432004928589, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"type": "adamw", "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(2,'s-0176214f5bde4fddb39fc51eabd6c05e:train:0',1,'{"step": 1, "at": 1795816017.0707328, "seconds": 0.019946187001551152, "split": {"optimizer": 0.00012521600001491606, "forward_backward": 0.0017476690009061713, "saving": 0.0, "sampling": 0.0, "waiting": 0.0008172150010068435, "client": 0.01725608699962322}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 35.16735601425171}, "forward": {}, "kl": null, "loss_mean": 8.791839003562927, "loss": "cross_entropy", "optimizer": {"grad_norm": 79.31067159600377, "grad_norm_clipped": 79.31067159600377, "weight_norm": 6.225988035896236, "loss": 35.16735601425171, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"type": "adamw", "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
INSERT INTO "history_step" VALUES(3,'s-0176214f5bde4fddb39fc51eabd6c05e:train:0',2,'{"step": 2, "at": 1795816017.104606, "seconds": 0.033873264999783714, "split": {"optimizer": 0.00012175099982414395, "forward_backward": 0.001993523999772151, "saving": 0.0, "sampling": 0.0, "waiting": 0.0004915920017083408, "client": 0.03126639799847908}, "calls": {"forward_backward": 1, "optim_step": 1}, "failed": 0, "datums": 1, "tokens": 4, "scored": 0, "drawn": 0, "prompt": 0, "metrics": {"loss:sum": 29.90957021713257}, "forward": {}, "kl": null, "loss_mean": 7.477392554283142, "loss": "cross_entropy", "optimizer": {"grad_norm": 68.57420291279176, "grad_norm_clipped": 68.57420291279176, "weight_norm": 6.243997455598471, "loss": 29.90957021713257, "loss_tokens": 4.0, "loss_sequences": 1.0}, "adam": {"type": "adamw", "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, "normalization": null}}');
CREATE TABLE run (
            id TEXT PRIMARY KEY,
            session TEXT,
            base_model TEXT NOT NULL,
            rank INTEGER NOT NULL,
            user_metadata TEXT NOT NULL,
            created TEXT NOT NULL);
INSERT INTO "run" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:train:0','s-0176214f5bde4fddb39fc51eabd6c05e','tiny',4,'{"renderer_name": "qwen3"}','2026-11-27T21:46:56.976684+00:00');
INSERT INTO "run" VALUES('s-ef44861aa45f45809dc3ef138555de03:train:0','s-ef44861aa45f45809dc3ef138555de03','tiny',2,'{}','2026-11-27T21:46:57.538312+00:00');
CREATE TABLE sampler (
            id TEXT PRIMARY KEY,
            session TEXT NOT NULL,
            base_model TEXT NOT NULL,
            path TEXT);
INSERT INTO "sampler" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e:sample:0','s-0176214f5bde4fddb39fc51eabd6c05e','tiny','tinker://s-0176214f5bde4fddb39fc51eabd6c05e:train:0/sampler_weights/b');
CREATE TABLE session (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            display_name TEXT,
            user_metadata TEXT NOT NULL,
            created TEXT NOT NULL,
            finish TEXT);
INSERT INTO "session" VALUES('s-0176214f5bde4fddb39fc51eabd6c05e','2155f41b43c94054f9fc7b7583f82c78','red bird','{"who": "me", "note": "gr\u00f6\u00dfer \ud83d\ude42"}','2026-11-27T21:46:56.964994+00:00','{"reason": {"type": "success"}, "detail": null}');
INSERT INTO "session" VALUES('s-ef44861aa45f45809dc3ef138555de03','2155f41b43c94054f9fc7b7583f82c78',NULL,'{"who": "you"}','2026-11-27T21:46:57.524139+00:00',NULL);
CREATE INDEX session_owner ON session (owner);
CREATE INDEX run_session ON run (session);
CREATE INDEX sampler_session ON sampler (session);
CREATE INDEX checkpoint_run ON checkpoint (run);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('history_step',3);
COMMIT;
PRAGMA user_version = 2;
