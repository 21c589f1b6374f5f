// What is told of a run beside its curves: its name, what it is about, and its settings.

import {ago, clock, el, facts, moment, seconds} from './dom.js';

const MONTHS = 'Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec'.split(' ');

// A base model's name; of a folder, what it is called.
export const baseOf = name => name.startsWith('/') ? name.split('/').pop() : name;
export const modelOf =
    ({base, rank}) => [base && baseOf(base), rank && `r${rank}`].filter(Boolean).join(' ');

// A run's id is its session's, "train" and a number; the session's first digits tell runs apart.
export const briefly = id => id.replace(/^s-([^:]{1,6})[^:]*:train:/, '$1:');

// A day and a time of this year, "Nov 27 21:40"; of another one with its number.
export function dayOf(text) {
  const at = new Date(text);
  if (at.getFullYear() !== new Date().getFullYear()) return clock(at).slice(0, 16);
  return `${MONTHS[at.getMonth()]} ${at.getDate()} ${clock(at).slice(11, 16)}`;
}

// What a run is called: its own name, or its recipe's or model's, and when it was made.
export const nameOf = run => run.name || run.user_metadata?.name || madeUp(run);
function madeUp(run) {
  const what = run.recipe || modelOf(run);
  return what && run.created ? `${what}, ${dayOf(run.created)}` : briefly(run.id);
}

// How long a run has taken, to its last call.
export function tookOf(run) {
  const took = run.created && run.seen ? run.seen - new Date(run.created) / 1000 : 0;
  return took > 0 ? seconds(took) : '';
}

// What the list says of a run beneath its name, without what the name says already.
export function factsOf(run) {
  const own = run.name || run.user_metadata?.name;
  return [
    own || run.recipe ? modelOf(run) : '',
    run.loss,
    own && run.created && dayOf(run.created),
  ].filter(Boolean);
}

// What stands beneath a run's title.
export function headline(run, about, seen) {
  const made = run.created ?? (about.created ? about.created * 1000 : null);
  return [
    about.recipe,
    about.base && baseOf(about.base),
    about.rank && `rank ${about.rank}`,
    about.loss,
    made && `begun ${moment(made)}`,
    made && seen && `for ${seconds(Math.max(0, seen - new Date(made) / 1000))}`,
    seen && `last call ${ago(seen)}`,
    ...Object.entries(about.user_metadata ?? {})
        .filter(([key]) => key !== 'name')
        .slice(0, 6)
        .map(pair => pair.join(': ')),
  ].filter(Boolean);
}

const group = (title, pairs) =>
    el('section', {className: 'panel card'}, el('h2', {}, title), facts(pairs));
const plain = of => Object.entries(of ?? {}).map(
    ([key, value]) => [key, typeof value === 'object' ? JSON.stringify(value) : value]);

// The settings of a run.
export function settings(id, about, created) {
  const run = [
    ['id', el('code', {}, id)],
    ['session', about.session],
    ['recipe', about.recipe],
    ['base model', about.base],
    ['begun', moment(created)],
    ['steps kept', about.stride > 1 ? `one in ${about.stride}` : 'all'],
    ['time in steps', seconds(about.seconds)],
  ];
  const lora = [
    ['rank', about.rank],
    ['alpha', about.alpha],
    ['seed', about.seed],
    ['attention', about.attn],
    ['MLP', about.mlp],
    ['unembedding', about.unembed],
  ];
  const loss = [['loss', about.loss], ['teacher', about.teacher], ...plain(about.loss_config)];
  return [
    group('Run', run),
    group('LoRA', lora),
    ...(about.loss ? [group('Loss', loss)] : []),
    ...(about.adam ? [group(`Optimizer: ${about.adam.type ?? 'adamw'}`, plain(about.adam))] : []),
    group('user_metadata', plain(about.user_metadata)),
  ];
}
