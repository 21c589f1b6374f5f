// A run's checkpoints: what they are, and what can be done with each.

import {briefly} from './about.js';
import {ask, get, runPath, send} from './api.js';
import {bytes, copy, el, minute, table} from './dom.js';

// How a checkpoint is called where its run is not shown beside it.
export function checkpointName(row) {
  const [run, , name] = row.path.replace('tinker://', '').split('/');
  return `${row.name || briefly(run)} · ${name} · step ${row.step} · ${row.kind}`;
}

const button = (text, onclick, title = '') =>
    el('button', {type: 'button', className: 'small', title, onclick}, text);
const copier = text => button('Copy path', event => copy(text, event.currentTarget), text);

export class Checkpoints {
  constructor(run) {
    this.run = run;
    this.root = el('div', {});
    this.shown = null;
  }

  // The newest come first. A table stays as it is while nothing has changed: it may be in use.
  async refresh() {
    const {checkpoints} = await get(runPath(this.run, '/checkpoints'));
    const hour = Math.floor(Date.now() / 3600000);  // links to download are signed for a day
    const rows = checkpoints.map(row => [row.path, row.created, row.ttl_ends]);
    const key = JSON.stringify([hour, rows]);
    if (key === this.shown) return;
    const empty = 'No checkpoints. save_state and save_weights_for_sampler make them.';
    this.root.replaceChildren(
        checkpoints.length ? table(this.columns(), checkpoints.reverse(), 'Checkpoints', 'stack') :
                             el('div', {className: 'empty card'}, empty));
    this.shown = key;
  }

  columns() {
    return [
      ['Checkpoint', row => this.first(row), 'long'],
      ['Kind', row => row.kind],
      ['Step', row => String(row.step), 'right'],
      ['Size', row => bytes(row.bytes), 'right'],
      ['Saved', row => minute(row.created)],
      [
        'Ttl ends',
        row => row.ttl_ends ? `${minute(row.ttl_ends)}${row.expires ? '' : ', only a mark'}` :
                              'no ttl',
        'wrap',
      ],
    ];
  }

  first(row) {
    const name = row.path.split('/').pop(), chat = `#/chat?b=${encodeURIComponent(row.path)}`;
    const tar = {className: 'button small', href: row.tar, download: `${name}.tar`};
    return [
      el('b', {}, name),
      el('code', {className: 'path', title: row.path}, row.path),
      el('div', {className: 'acts'},
         row.kind !== 'external' && el('a', {className: 'button small', href: chat}, 'Chat'),
         copier(row.path), el('a', {...tar, title: 'PEFT’s files in one tar'}, 'Download'),
         row.export && button('Export', () => this.export(row), 'The command that merges it'),
         button('Delete', () => this.delete(row))),
    ];
  }

  async export({path, export: command}) {
    const text = 'Run this where the server runs. It writes the base model with the adapter ' +
        'merged in, a Hugging Face folder; with --gguf, one file for llama.cpp.';
    await ask(`Export ${path.split('/').pop()}`, [
      el('p', {}, text),
      el('code', {className: 'command'}, command),
      button('Copy command', event => copy(command, event.currentTarget)),
    ]);
  }

  async delete({path, place, created, bytes: size}) {
    const what = [
      el('p', {}, el('code', {}, path)),
      el('p', {}, `Its ${bytes(size)} are deleted from the disk. It can’t be had back.`),
    ];
    if (!await ask(`Delete ${path.split('/').pop()}?`, what, 'Delete')) return;
    try {
      const {checkpoints} = await get(runPath(this.run, '/checkpoints'));
      const there = checkpoints.find(row => row.path === path);
      if (there && there.created !== created) throw new Error('It was saved again meanwhile.');
      await send(place, {method: 'DELETE'});
    } catch (error) {
      await ask('It was not deleted', [el('p', {}, error.message)]);
    }
    await this.refresh();
  }
}
