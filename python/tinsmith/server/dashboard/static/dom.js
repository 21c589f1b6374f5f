// Elements without markup: every text goes through textContent, so nothing said by a model or a
// client can become more than text.

const SVG = 'http://www.w3.org/2000/svg';

function fill(made, facts, children) {
  for (const [key, value] of Object.entries(facts)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith('on'))
      made.addEventListener(key.slice(2), value);
    else if (key === 'style')
      for (const [name, of] of Object.entries(value)) made.style.setProperty(name, of);
    else if (key in made && !(made instanceof SVGElement) && key !== 'list')
      made[key] = value;
    else
      made.setAttribute(key, value === true ? '' : value);
  }
  made.append(...children.flat(Infinity).filter(
      child => child !== null && child !== undefined && child !== false));
  return made;
}

// An element with attributes, properties or listeners (onclick), and children: elements or texts.
export const el = (tag, facts = {}, ...children) =>
    fill(document.createElement(tag), facts, children);
export const svg = (tag, facts = {}, ...children) =>
    fill(document.createElementNS(SVG, tag), facts, children);
// A colour of the theme.
export const inkOf = name =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const byId = name => document.getElementById(name);

// ---- numbers ----

export function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace('e+', 'e');
  if (size >= 1e4) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(digits)));
}

export function count(value) {
  if (value === null || value === undefined) return '–';
  for (const [scale, unit] of [[1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
    if (value >= scale) return `${short(value / (unit === 'k' ? 1e3 : scale), 3)}${unit}`;
  }
  return Math.round(value).toLocaleString('en');
}

// A number of things, in a word of its own where it is one.
export const times = (value, thing) => `${count(value)} ${thing}${value === 1 ? '' : 's'}`;

export function bytes(value) {
  if (value === null || value === undefined) return '–';
  for (const [scale, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) {
    if (value >= scale) return `${(value / scale).toFixed(value / scale < 10 ? 2 : 1)} ${unit}`;
  }
  return `${value} B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value), minutes = Math.round(value / 60);
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(at) {
  const passed = Date.now() / 1000 - at;
  if (!at) return '–';
  if (passed < 5) return 'now';
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return clock(new Date(at * 1000)).slice(0, 10);
}

// A moment of this machine's time, as ISO 8601 writes it.
export function clock(at) {
  const two = value => String(value).padStart(2, '0');
  const day = [at.getFullYear(), two(at.getMonth() + 1), two(at.getDate())].join('-');
  return `${day} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(':')}`;
}

export const minute = text => clock(new Date(text)).slice(0, 16);
export const moment = text => (text ? clock(new Date(text)) : '–');

// A probability, and the logarithm that it came from.
export function chance(logprob) {
  if (logprob === null || logprob === undefined) return '–';
  const share = 100 * Math.exp(logprob);
  const digits = share >= 99.95 || share === 0 ? 0 : share >= 10 ? 1 : share >= 0.1 ? 2 : 4;
  return `${share.toFixed(digits)} %`;
}

export const visible = text => text.replaceAll('\n', '⏎').replaceAll('\t', '⇥') || '∅';

// ---- tables ----

// Columns are [title, value of a row, class]; a value is a text or elements. The rows of a stack
// are blocks on a narrow screen.
export function table(columns, rows, label, kind = '') {
  const head = columns.map(([title, , kind]) => el('th', {className: kind, scope: 'col'}, title));
  const cells = row =>
      columns.map(([title, of, kind]) => el('td', {className: kind, 'data-title': title}, of(row)));
  return el(
      'div', {className: 'scroll card'},
      el('table', {className: `list ${kind}`, 'aria-label': label},
         el('thead', {}, el('tr', {}, head)),
         el('tbody', {}, rows.map(row => el('tr', {}, cells(row))))));
}

// Names and values; those without a value are left out.
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== '');
  const shown = value => value instanceof Node ? value : String(value);
  return el(
      'dl', {className: 'facts-list'},
      known.map(([name, value]) => [el('dt', {}, name), el('dd', {}, shown(value))]));
}

// Copies a text, and says so on the button that was pressed. A page that came by plain HTTP from
// another machine has no clipboard: there the text is selected in a field of its own, and copied.
export async function copy(text, button) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text).catch(() => {});
  } else {
    const field = el('textarea', {value: text, className: 'hidden'});
    (button.closest('dialog') ?? document.body).append(field);
    field.select();
    document.execCommand('copy');
    field.remove();
  }
  const before = button.textContent;
  button.textContent = 'Copied';
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}
