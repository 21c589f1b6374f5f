/* train/objective_logprob.h - a loss on the targets' log-probabilities. */
#ifndef TINSMITH_TRAIN_OBJECTIVE_LOGPROB_H
#define TINSMITH_TRAIN_OBJECTIVE_LOGPROB_H

#include "step.h"

extern const Objective targets_objective;
/* The memory of a step of T rows of one datum, for any loss. */
Status targets_needs(Trainer *trainer, int T, StepNeeds *needs);

#endif
