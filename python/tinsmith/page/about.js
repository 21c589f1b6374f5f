// What is told of a run beside its curves: its name, checkpoints and settings.

import {bytes, el, facts, moment, seconds, table} from './dom.js';

// A run's id is its session's, "train" and a number; the session's first digits tell runs apart.
export const briefly = id => id.replace(/^s-([^:]{1,6})[^:]*:train:/, '$1:');
export const nameOf = run => run.name || run.user_metadata?.name || briefly(run.id);

// A base model's name; of a folder, what it is called.
export const baseOf = name => name.startsWith('/') ? name.split('/').pop() : name;

// How a checkpoint is called where its run is not shown beside it.
export function checkpointName(row) {
  const [run, , name] = row.path.replace('tinker://', '').split('/');
  return `${row.name || briefly(run)} · ${name} · step ${row.step} · ${row.kind}`;
}

const CHECKPOINT = [
  ['Name', row => el('code', {}, row.path.split('/').pop())],
  ['Kind', row => row.kind],
  ['Step', row => String(row.step), 'right'],
  ['Size', row => bytes(row.bytes), 'right'],
  ['Saved', row => moment(row.created)],
  [
    'Ttl ends',
    row => row.ttl_ends ? moment(row.ttl_ends) + (row.expires ? '' : ', only a mark') : 'no ttl',
  ],
  ['Path', row => el('code', {}, row.path), 'long'],
  [
    '',
    row => row.kind === 'external' ?
        '' :
        el('a', {href: `#/chat?b=${encodeURIComponent(row.path)}`}, 'Chat'),
  ],
];

// The checkpoints of a run, the newest first.
export const checkpoints = rows => rows.length ?
    table(CHECKPOINT, [...rows].reverse(), 'Checkpoints') :
    el('div', {className: 'empty card'},
       'No checkpoints. save_state and save_weights_for_sampler make them.');

const group = (title, pairs) =>
    el('section', {className: 'panel card'}, el('h2', {}, title), facts(pairs));
const plain = of => Object.entries(of ?? {}).map(
    ([key, value]) => [key, typeof value === 'object' ? JSON.stringify(value) : value]);

// The settings of a run.
export function settings(id, about, created) {
  const run = [
    ['id', el('code', {}, id)],
    ['session', about.session],
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
