// The page's frame: the list of runs, which view is shown, live updates, themes and keys.
// The address says what is shown: #/run/ID?with=ID,ID&tab=samples, #/chat?a=NAME&b=PATH, #/machine.

import {factsOf, nameOf, tookOf} from './about.js';
import {get} from './api.js';
import {spark} from './charts.js';
import {Chat} from './chat.js';
import {ago, byId, el, inkOf, short} from './dom.js';
import {Machine} from './machine.js';
import {RunView, TABS} from './run.js';
import {loadPlotly} from './plots.js';
import {hideTip} from './tokens.js';

const LIVE_MS = 1000, LIST_MS = 2500, IDLE_MS = 4000, WHOLE_MS = 60000;
const BUSY = ['training', 'waiting', 'live'];
const THEME = 'tinsmith-theme';
const KEYS = [
  ['j, k', 'next run, previous run'],
  ['x', 'compare the run with what is shown'],
  ['/', 'search the runs'],
  ['1 – 4', TABS.join(', ')],
  ['r, c, m', 'runs, chat, machine'],
  ['t', 'dark or light'],
  ['← →', 'move the cursor in a chart, a token in a text'],
  ['Esc', 'leave a field, end a comparison'],
  ['?', 'this list'],
];

const settings = {
  smoothing: 0,
  log: false,
  open: new Map(),  // groups of the client's numbers
};
const runs = new Map();
let chat = null, view = null, shown = '', order = [], timer = 0, listed = 0, whole = 0, after = 0;

// ---- the address ----

function where() {
  const [path, query = ''] = location.hash.slice(1).split('?');
  const [, name = '', id = ''] = path.split('/');
  return {name, id: decodeURIComponent(id), query: new URLSearchParams(query)};
}

function goTo(ids, tab) {
  const query = new URLSearchParams();
  if (ids.length > 1) query.set('with', ids.slice(1).join(','));
  if (tab && tab !== 'curves') query.set('tab', tab);
  location.hash = `#/run/${encodeURIComponent(ids[0])}${query.size ? `?${query}` : ''}`;
}

function show() {
  const {name, id, query} = where();
  hideTip();
  const kind = ['chat', 'machine'].includes(name) ? name : 'runs';
  for (const link of document.querySelectorAll('.top nav a')) {
    if (link.dataset.view === kind)
      link.setAttribute('aria-current', 'page');
    else
      link.removeAttribute('aria-current');
  }
  document.querySelector('.frame').classList.toggle('wide', kind !== 'runs');
  if (kind === 'runs' && name !== 'run') {
    if (order.length)
      goTo([order[0]]);
    else
      put('', {root: noRuns()});
    return undefined;
  }
  if (location.hash === shown) return undefined;
  if (kind === 'machine') put(location.hash, new Machine(runs));
  if (kind === 'chat') {
    chat ??= new Chat();
    chat.open({a: query.get('a'), b: query.get('b')});
    put(location.hash, chat);
  }
  if (kind === 'runs') {
    const ids = [id, ...(query.get('with')?.split(',') ?? [])];
    put(location.hash, new RunView(ids, query.get('tab'), settings, runs));
  }
  mark();
  return tick();
}

const noRuns = () =>
    el('div', {className: 'empty card'},
       el('div', {}, el('h1', {}, 'No runs yet'),
          el('p', {}, 'Start a recipe with this server as its TINKER_BASE_URL. ',
             'It appears here with its first call.')));

function put(hash, made) {
  view?.close?.();
  [view, shown] = [made, hash];
  byId('main').replaceChildren(made.root);
}

// ---- live ----

function lost(error) {
  byId('pulse').className = 'pulse lost';
  byId('pulse').textContent = error?.status ? error.message.slice(0, 80) : 'no answer';
}

// Asks for the runs that are new or may have changed; now and then for all, the newest first.
async function listRuns() {
  const all = Date.now() - whole > WHOLE_MS;
  const told = await get(all ? 'page/data/runs' : `page/data/runs?after=${after}`);
  if (all) runs.clear();
  for (const run of told.runs) runs.set(run.id, run);
  const made = run => run.created ?? '';
  const found =
      [...runs.values()].sort((a, b) => b.seen - a.seen || made(b).localeCompare(made(a)));
  runs.clear();
  for (const run of found) runs.set(run.id, run);
  [listed, after] = [Date.now(), Math.floor(told.now)];
  if (all) whole = listed;
  list();
}

async function tick() {
  clearTimeout(timer);
  let wait = IDLE_MS;
  if (!document.hidden) {
    try {
      if (Date.now() - listed > LIST_MS) await listRuns();
      if (!shown) show();
      await view?.refresh?.();
      byId('pulse').className = 'pulse live';
      byId('pulse').textContent = 'live';
      if ([...runs.values()].some(run => BUSY.includes(run.status))) wait = LIVE_MS;
    } catch (error) {
      lost(error);
    }
  }
  clearTimeout(timer);
  timer = setTimeout(tick, wait);
}

// ---- the list ----

function last(run) {
  const value = run.reward === null ? run.loss_mean : run.reward;
  const number = value !== null && `${run.reward === null ? 'loss' : 'reward'} ${short(value, 3)}`;
  const told = [run.step !== null && `step ${run.step}`, number].filter(Boolean).join(' · ');
  return [told || run.status, el('br'), tookOf(run)];
}

function entry(run) {
  const box = {
    type: 'checkbox',
    title: 'Compare',
    'aria-label': `Compare ${nameOf(run)}`,
    onchange: () => compare(run.id),
  };
  const link = {
    href: `#/run/${encodeURIComponent(run.id)}`,
    title: `${run.id}\n${run.status}, ${ago(run.seen)}`,
  };
  const dot = el('span', {className: `dot ${run.status}`, title: run.status});
  return el(
      'li', {'data-run': run.id}, el('input', box),
      el('a', link, el('span', {className: 'name'}, dot, nameOf(run)),
         el('span', {className: 'sub'}, last(run)), spark(run.spark, inkOf('accent')),
         el('span', {className: 'sub'},
            factsOf(run).map(text => text.replaceAll(' ', '\u00a0')).join('\u00a0· '))));
}

const textOf = run => [run.id, run.name, run.base, run.status, run.loss, run.recipe, nameOf(run),
                       run.user_metadata]
                          .map(part => JSON.stringify(part ?? ''))
                          .join(' ')
                          .toLowerCase();

// Shows the runs that have the words which are searched for. The focus stays where it is.
function list() {
  const words = byId('search').value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...runs.values()].filter(run => words.every(word => textOf(run).includes(word)));
  order = found.map(run => run.id);
  const at = document.activeElement, focused = at.closest('#runs li')?.dataset.run;
  byId('runs').replaceChildren(...found.map(entry));
  const row = [...byId('runs').children].find(one => one.dataset.run === focused);
  row?.querySelector(at.type === 'checkbox' ? 'input' : 'a').focus();
  byId('none').hidden = found.length > 0;
  byId('none').textContent = runs.size ? 'No run fits the search.' : 'No runs yet.';
  mark();
}

function mark() {
  const ids = view instanceof RunView ? view.ids : [];
  for (const row of byId('runs').children) {
    row.classList.toggle('on', row.dataset.run === ids[0]);
    row.querySelector('input').checked = ids.includes(row.dataset.run);
    if (row.dataset.run === ids[0]) row.querySelector('a').setAttribute('aria-current', 'true');
  }
}

function compare(id) {
  const ids = view instanceof RunView ? view.ids : [];
  const now = ids.includes(id) ? ids.filter(one => one !== id) : [...ids, id];
  if (now.length)
    goTo(now, view?.tab);
  else
    mark();
}

// ---- themes and keys ----

function theme(name) {
  document.documentElement.dataset.theme = name;
  list();
  view?.draw?.(true);
}

const preferred = matchMedia('(prefers-color-scheme: dark)');
const kept = () => localStorage.getItem(THEME);

function turn() {
  const name = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  localStorage.setItem(THEME, name);
  theme(name);
}

function move(by) {
  const ids = view instanceof RunView ? view.ids : [];
  const next = order[Math.max(0, Math.min(order.length - 1, order.indexOf(ids[0]) + by))];
  if (next) goTo([next], view?.tab);
}

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector('dialog[open]'))
    return;
  const field =
      event.target.closest('input:not([type=checkbox]):not([type=range]), textarea, select');
  if (event.key === 'Escape') {
    hideTip();
    if (field)
      field.blur();
    else if (view instanceof RunView && view.ids.length > 1)
      goTo(view.ids.slice(0, 1), view.tab);
    return;
  }
  if (field) return;
  const tab = TABS[Number(event.key) - 1];
  const go = hash => () => {
    location.hash = hash;
  };
  const at = document.activeElement.closest('#runs li')?.dataset.run;
  const keys = {
    j: () => move(1),
    k: () => move(-1),
    x: () => compare(at ?? order.find(id => !(view?.ids ?? []).includes(id))),
    '/': () => byId('search').focus(),
    r: go('#/'),
    c: go('#/chat'),
    m: go('#/machine'),
    t: turn,
    '?': help,
  };
  const act = tab && view instanceof RunView ? () => view.open(tab) : keys[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
}

function help() {
  byId('keys').querySelector('dl').replaceChildren(
      ...KEYS.map(([key, what]) => [el('dt', {}, el('kbd', {}, key)), el('dd', {}, what)]).flat());
  byId('keys').showModal();
}

async function start() {
  document.documentElement.dataset.theme = kept() ?? (preferred.matches ? 'dark' : 'light');
  preferred.addEventListener('change', event => kept() ?? theme(event.matches ? 'dark' : 'light'));
  byId('theme').addEventListener('click', turn);
  byId('help').addEventListener('click', help);
  byId('search').addEventListener('input', list);
  document.addEventListener('keydown', keyed);
  document.addEventListener('scroll', hideTip, {capture: true, passive: true});
  document.addEventListener('visibilitychange', () => document.hidden || tick());
  addEventListener('hashchange', show);
  listRuns().catch(lost);  // while plotly comes, which is large
  try {
    const hello = await get('page/data/hello');
    if (hello.plotly) await loadPlotly();
  } catch (error) {
    lost(error);
  }
  if (location.hash.length > 2)
    show();
  else
    await tick();
}

start();
