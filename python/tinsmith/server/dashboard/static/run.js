// One run, or several compared: what it does now, its curves, samples, checkpoints and settings.

import {baseOf, briefly, headline, nameOf, settings} from './about.js';
import {get, runPath} from './api.js';
import {Checkpoints} from './checkpoints.js';
import {Curves, per} from './curves.js';
import {ago, count, el, seconds, short, times} from './dom.js';
import {Samples} from './samples.js';

export const TABS = ['curves', 'samples', 'checkpoints', 'settings'];

const tile = (label, value, about = '') =>
    el('div', {className: 'tile card', title: about}, el('div', {className: 'label'}, label),
       el('div', {className: 'value'}, value));

export class RunView {
  constructor(ids, tab, shared, list) {
    [this.ids, this.list] = [ids, list];
    this.data =
        new Map(ids.map(id => [id, {steps: new Map(), logged: new Map(), place: 0, log_place: 0}]));
    this.curves = new Curves(shared);
    this.samples = new Samples(ids[0]);
    this.drawn = '';
    this.head = el('div', {});
    this.tiles = el('div', {className: 'tiles'});
    this.doing = el('div', {className: 'doing card', role: 'status'});
    this.error = el('div', {className: 'note card', hidden: true});
    this.warning = el('div', {className: 'warning card', hidden: true});
    this.checkpoints = new Checkpoints(ids[0]);
    this.settings = el('div', {className: 'columns'});
    this.body = el('div', {role: 'tabpanel', id: 'panel'});
    this.tabs =
        el('div', {className: 'tabs', role: 'tablist'}, TABS.map(name => this.button(name)));
    this.tabs.addEventListener('keydown', event => this.key(event));
    this.root =
        el('div', {}, this.head, this.error, this.warning, this.tiles, this.doing, this.tabs,
           this.body);
    this.open(TABS.includes(tab) ? tab : 'curves');
  }

  button(name) {
    const open = () => this.open(name);
    const facts = {type: 'button', role: 'tab', 'data-tab': name, 'aria-controls': 'panel'};
    return el('button', {...facts, onclick: open}, name[0].toUpperCase() + name.slice(1));
  }

  key(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    const next = (TABS.indexOf(this.tab) + by + TABS.length) % TABS.length;
    this.open(TABS[next]);
    this.tabs.children[next].focus();
  }

  open(tab) {
    this.tab = tab;
    for (const button of this.tabs.children) {
      const here = button.dataset.tab === tab;
      button.setAttribute('aria-selected', here);
      button.tabIndex = here ? 0 : -1;
    }
    const parts = {
      curves: this.curves.root,
      samples: this.samples.root,
      checkpoints: this.checkpoints.root,
      settings: this.settings,
    };
    this.body.replaceChildren(parts[tab]);
    this.fill().catch(() => {});  // the next refresh tells of it
    this.draw(true);
  }

  async fill() {
    if (this.tab === 'samples') await this.samples.refresh();
    if (this.tab === 'checkpoints') await this.checkpoints.refresh();
  }

  async refresh() {
    await Promise.all(this.ids.map(id => this.ask(id)));
    const run = this.list.get(this.ids[0]) ?? {id: this.ids[0]};
    const {about} = this.main;
    this.drawHead(run, this.main);
    this.drawTiles(about);
    this.drawDoing(this.main);
    this.settings.replaceChildren(...settings(run.id, about, run.created));
    this.draw();
    await this.fill();
  }

  // Asks for a run's new steps, and its client's numbers. Of a long run the server keeps every
  // second step, and so on; the numbers that it keeps of many come anew.
  async ask(id) {
    const known = this.data.get(id);
    const after = `?after=${known.place}&logged=${known.log_place}`;
    const told = await get(runPath(id, after));
    if (told.about.log_thinned !== known.about?.log_thinned) known.logged.clear();
    for (const row of told.logged) known.logged.set(row.step, row);
    const stride = told.about.stride ?? 1;
    if (stride !== (known.about?.stride ?? 1))
      for (const step of known.steps.keys())
        if (step % stride) known.steps.delete(step);
    for (const row of told.steps) known.steps.set(row.step, row);
    Object.assign(known, told, {steps: known.steps, logged: known.logged});
  }

  get main() {
    return this.data.get(this.ids[0]);
  }

  drawHead(run, {about, status, seen}) {
    const others = this.ids.length > 1 ? `and ${this.ids.length - 1} more` : '';
    const told = headline(run, about, seen);
    this.head.replaceChildren(
        el('div', {className: 'head'}, el('h1', {title: run.id}, nameOf(run)),
           el('span', {className: `pill ${status}`, id: 'status'}, status),
           el('span', {className: 'quiet'}, others)),
        el('p', {className: 'facts'}, told.map(text => el('span', {}, text))));
    this.error.hidden = !about.error;
    if (about.error) {
      const what = el('b', {}, `${about.error.what} failed ${ago(about.error.at)}: `);
      this.error.replaceChildren(what, about.error.detail);
    }
    this.warning.hidden = !about.warning;
    if (about.warning) this.warning.replaceChildren(about.warning.detail);
  }

  drawTiles({steps = 0, tokens = 0, drawn = 0, last = {}, reward, logged = {}}) {
    const {grad_norm: norm} = last.optimizer ?? {};
    const speed = per((last.tokens ?? 0) + (last.drawn ?? 0), last.seconds);
    this.tiles.replaceChildren(
        ...[reward && tile('Reward', short(logged[reward], 3), reward),
            tile('Steps', count(steps)),
            tile('Loss per token', short(last.loss_mean, 3), 'nats'),
            tile('Tokens / s', short(speed, 3)),
            tile('Last step', seconds(last.seconds)),
            tile('Gradient norm', short(norm, 3)),
            last.kl && tile('Sampler KL', short(last.kl.v1, 3), 'KL sampler–trainer, nats'),
            tile('Trained on', count(tokens)),
            drawn && tile('Sampled', count(drawn)),
    ].filter(Boolean));
  }

  drawDoing({doing, waiting, sampling, under_way: now, status, seen, about}) {
    const mine = doing?.run === this.ids[0];
    const dot = of => el('span', {className: `dot ${of}`});
    const quiet = text => el('span', {className: 'quiet num'}, text);
    const parts = [];
    if (mine) {
      const tokens = doing.tokens ? `, ${count(doing.tokens)} tokens` : '';
      parts.push(
          el('span', {}, dot('training'), `${doing.kind}, ${seconds(doing.seconds)}`),
          el('progress', {max: doing.count, value: doing.done, 'aria-label': 'micro-batches'}),
          quiet(`${doing.done} of ${doing.count} micro-batches${tokens}`));
    } else {
      parts.push(el(
          'span', {}, dot(status),
          status === 'ended' ? 'This run has ended. Its history stays.' : this.between(now, seen)));
      if (doing) parts.push(el('span', {}, 'The engine works for ', this.link(doing.run)));
    }
    if (sampling)
      parts.push(quiet(`${times(sampling, 'sample')} under way on ${baseOf(about.base)}`));
    const behind = waiting - (mine ? 1 : 0);
    if (behind > 0) parts.push(quiet(`${times(behind, 'request')} of this run in line`));
    this.doing.replaceChildren(...parts);
  }

  // What a run does that the engine does not work for.
  between(now, seen) {
    const calls = Object.entries(now?.calls ?? {}).map(([kind, number]) => `${number} × ${kind}`);
    if (calls.length) return `Step ${now.step} so far: ${calls.join(', ')}`;
    return seen ? `Between two calls, the last ${ago(seen)}` : 'No call yet';
  }

  link(id) {
    return el('a', {href: `#/run/${encodeURIComponent(id)}`}, nameOf(this.list.get(id) ?? {id}));
  }

  draw(again = false) {
    if (this.tab !== 'curves' || !this.main.about) return;
    const key =
        this.ids.map(id => [this.data.get(id).place, this.data.get(id).log_place]).join(' ');
    if (!again && key === this.drawn) return;
    this.drawn = key;
    const names = this.ids.map(id => nameOf(this.list.get(id) ?? {id}));
    this.curves.draw(this.ids.map((id, i) => {
      const {steps, logged: own, about} = this.data.get(id);
      const [rows, logged] =
          [steps, own].map(of => [...of.values()].sort((a, b) => a.step - b.step));
      const alone = names.indexOf(names[i]) === names.lastIndexOf(names[i]);
      return {name: alone ? names[i] : `${names[i]} ${briefly(id)}`, rows, logged, about};
    }));
  }

  close() {
    this.curves.close();
  }
}
