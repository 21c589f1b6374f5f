// The last samples and datums of a run: the student's tokens, the teacher's beside them.

import {baseOf} from './about.js';
import {get, runPath} from './api.js';
import {ago, byId, el} from './dom.js';
import {TokenText} from './tokens.js';

const ASK_MS = 5000;

// What a text may be coloured by: a name, and what no colour and the full one mean.
const COLOURS = {
  own: ['log-probability', 'likely', 'surprising'],
  difference: ['teacher − student', 'teacher less', 'teacher more'],
  divergence: ['divergence', 'none', '1 nat'],
};
const KINDS = {
  '': 'samples and datums',
  sample: 'samples',
  datum: 'datums',
};

const tokensOf = row => row.tokens.map((text, i) => {
  const {student, teacher, sampler, best, live, divergence} = row;
  return {
    text,
    logprob: student?.[i],
    teacher: teacher?.[i],
    sampler: sampler?.[i],
    best: best?.[i],
    live: live?.[i],
    divergence: divergence?.[i],
  };
});

const promptOf = row => `${row.prompt_cut ? '… ' : ''}${row.prompt}`;

function side(row, label, by, prompt = '') {
  const text = new TokenText(label, by, prompt);
  for (const token of tokensOf(row)) text.add(token);
  if (row.cut) text.root.append(el('span', {className: 'prompt'}, ` … ${row.cut} more tokens`));
  return text.root;
}

// Where a teacher has scored the tokens too, both sides stand beside each other, behind the prompt.
function body(row, by) {
  if (!row.teacher || by !== 'own') return side(row, 'The text', by, promptOf(row));
  const {teacher_name: name} = row;
  const titled = (title, text) => el('div', {}, el('h4', {}, title), text);
  return [
    el('div', {className: 'before'}, promptOf(row).trimEnd()),
    el('div', {className: 'pair'}, titled('student', side(row, 'The student', 'own')),
       titled(name ? `teacher · ${baseOf(name)}` : 'teacher', side(row, 'The teacher', 'teacher'))),
  ];
}

function card(row, by) {
  const told = [
    `step ${row.step}`,
    `${row.tokens.length + row.cut} tokens`,
    row.stop && `ended by ${row.stop}`,
    row.temperature !== undefined && `temperature ${row.temperature}`,
    ago(row.at),
  ];
  const kind = el('b', {}, row.kind === 'sample' ? 'Sample' : `Datum · ${row.loss}`);
  const header = el('header', {}, kind, told.filter(Boolean).map(text => el('span', {}, text)));
  return el('article', {className: 'sample card', 'data-kind': row.kind}, header, body(row, by));
}

export class Samples {
  constructor(run) {
    this.run = run;
    this.rows = [];
    this.seen = '';  // what the server calls these rows
    this.asked = 0;
    const choice = (label, names) =>
        el('select', {'aria-label': label, onchange: () => this.draw()},
           Object.entries(names).map(([value, name]) => el('option', {value}, [name].flat()[0])));
    this.kind = choice('Which', KINDS);
    this.by = choice('Colour by', COLOURS);
    this.scale = el('span', {className: 'scale'});
    this.list = el('div', {});
    const tools =
        el('div', {className: 'tools'}, el('label', {}, 'Show', this.kind),
           el('label', {}, 'Colour by', this.by), this.scale);
    this.root = el('div', {}, tools, this.list);
  }

  async refresh() {
    if (Date.now() - this.asked < ASK_MS || !byId('tip').hidden) return;  // or somebody reads
    this.asked = Date.now();
    const {samples, seen} = await get(runPath(this.run, `/samples?seen=${this.seen}`));
    if (!samples || !byId('tip').hidden) return;
    [this.rows, this.seen] = [samples, seen];
    this.draw();
  }

  draw() {
    const by = this.by.value, kind = this.kind.value, [, none, full] = COLOURS[by];
    this.scale.className = `scale${by === 'difference' ? ' both' : ''}`;
    this.scale.replaceChildren(none, el('i', {}), full);
    const rows = this.rows.filter(row => !kind || row.kind === kind);
    const empty = 'Nothing sampled or trained yet. What this run samples and trains on comes here.';
    this.list.replaceChildren(...rows.map(row => card(row, by)));
    if (!rows.length) this.list.append(el('div', {className: 'empty card'}, empty));
  }
}
