/* train/micro_work.h - the work on one micro-batch, and what an objective does with it. */
#ifndef TINSMITH_TRAIN_MICRO_WORK_H
#define TINSMITH_TRAIN_MICRO_WORK_H

#include "step.h"

/* All work on the current micro-batch, which is placed and ordered. */
Status micro_work(TrainStep *step);
/* Does the host's work, except in rehearsals. */
Status step_host(TrainStep *step, HostWork *work, int from, int to);
/* Called between chunks and micro-batches: fails if the call was interrupted. */
Status step_going(const TrainStep *step);
/* Adds to the loss of the current micro-batch; fails if it is not finite. */
Status step_loss(TrainStep *step, double loss);
/* Copies fetched log-probabilities to the result. */
void step_result(TrainStep *step);

const Model *step_model(const TrainStep *step);
/* The last stage's device, which computes logits and losses. */
Device *step_device(const TrainStep *step);
/* On it: the gradients' arrays, and the hidden rows that the head reads. */
Grads *step_last_grads(TrainStep *step);
const real *step_hidden(const TrainStep *step);

#endif
