// What draws a chart: plotly.js where the server has it, else lines and bars of plain SVG. Both
// have the same margins, and tell which step is where.

import {el, inkOf, short, svg} from './dom.js';

export const LEFT = 50;  // of a plot, in CSS pixels, to its axis
const MARGIN = {
  l: LEFT,
  r: 10,
  t: 8,
  b: 24
};

let plotly = null;

// Loads plotly.js from this server; the page does without it where that fails. While it loads, the
// styles of its maps are kept out: the server's policy refuses them, and there are no maps here.
export function loadPlotly() {
  const {head} = document, add = head.appendChild;
  head.appendChild = node =>
      node.tagName === 'STYLE' && node.textContent ? node : add.call(head, node);
  return new Promise(done => {
    const end = () => {
      delete head.appendChild;
      plotly = window.Plotly ?? null;
      done();
    };
    head.append(el('script', {
      src: new URL('page/static/plotly.min.js', document.baseURI).href,
      onload: end,
      onerror: end
    }));
  });
}


// From the least to the largest of values, with some room, also where all are equal. On a log scale
// in powers of ten.
function reach(values, log) {
  const fit =
      values.filter(value => Number.isFinite(value) && value !== null && (!log || value > 0))
          .map(value => (log ? Math.log10(value) : value));
  if (!fit.length) return [0, 1];
  const low = Math.min(...fit), high = Math.max(...fit);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(n => n * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step)
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

// Lines or stacked bars as plain SVG.
class Plain {
  constructor(face) {
    this.face = face;
    this.scale = null;
  }

  draw(series, {log, stacked}) {
    const {width, height} = this.face.getBoundingClientRect();
    if (!width) return;
    const xs = series.flatMap(one => one.x);
    const ys = stacked ?
        series[0].x.map((_, i) => series.reduce((sum, one) => sum + (one.y[i] ?? 0), 0)) :
        series.flatMap(one => [...one.y, ...(one.raw ?? [])]);
    const [low, high] = stacked ? [0, Math.max(...ys, 1e-9) * 1.06] : reach(ys, log);
    let [left, right] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    if (left === right || stacked) [left, right] = [left - 0.5, right + 0.5];
    const inner = [width - MARGIN.l - MARGIN.r, height - MARGIN.t - MARGIN.b];
    const px = x => MARGIN.l + ((x - left) / (right - left)) * inner[0];
    const py = y => MARGIN.t + (1 - (y - low) / (high - low)) * inner[1];
    this.scale = {px, x: at => left + ((at - MARGIN.l) / inner[0]) * (right - left)};
    const marks = [];
    for (const at of ticks(low, high, 4)) {
      marks.push(
          svg('line', {class: 'grid', x1: MARGIN.l, x2: width - MARGIN.r, y1: py(at), y2: py(at)}));
      marks.push(
          svg('text', {x: MARGIN.l - 6, y: py(at) + 4, 'text-anchor': 'end'},
              short(log ? 10 ** at : at, 3)));
    }
    for (const at of ticks(left, right, Math.max(2, inner[0] / 70)).filter(Number.isInteger)) {
      marks.push(svg('text', {x: px(at), y: height - 7, 'text-anchor': 'middle'}, String(at)));
    }
    this.face.replaceChildren(
        svg('svg', {class: 'plain', 'aria-hidden': 'true'}, marks,
            stacked ? this.bars(series, px, py) : series.map(one => this.lines(one, px, py, log))));
  }

  bars(series, px, py) {
    const base = (series[0]?.x ?? []).map(() => 0);
    const gap = Math.min(...series[0].x.slice(1).map((x, i) => x - series[0].x[i]), Infinity);
    const wide = Math.max(1, (px(Number.isFinite(gap) ? gap : 1) - px(0)) * 0.82);
    return series.map(one => one.x.map((x, i) => {
      const from = base[i];
      base[i] += one.y[i] ?? 0;
      const tall = py(from) - py(base[i]);
      return tall > 0.2 &&
          svg('rect',
              {x: px(x) - wide / 2, y: py(base[i]), width: wide, height: tall, fill: one.color});
    }));
  }

  lines(one, px, py, log) {
    const path = values => {
      let text = '', pen = false;
      values.forEach((value, i) => {
        const fits = value !== null && Number.isFinite(value) && (!log || value > 0);
        if (fits)
          text += `${pen ? 'L' : 'M'}${px(one.x[i]).toFixed(1)} ${
              py(log ? Math.log10(value) : value).toFixed(1)}`;
        pen = fits;
      });
      return text;
    };
    const at = log ? Math.log10(one.y[0]) : one.y[0];
    const alone = one.x.length === 1 && Number.isFinite(at) &&
        svg('circle', {cx: px(one.x[0]), cy: py(at), r: 3, fill: one.color});
    return [
      one.raw && svg('path', {d: path(one.raw), stroke: one.color, opacity: 0.28}),
      svg('path', {d: path(one.y), stroke: one.color}), alone
    ];
  }

  place = x => this.scale?.px(x) ?? null;
  value = at => this.scale?.x(at) ?? null;
  resize = () => false;
  zoom() {}
  close() {}
}

class Plotly {
  constructor(face, group) {
    this.face = face;
    this.group = group;
    this.heard = false;
  }

  draw(series, {log, stacked}) {
    const soft = inkOf('soft'), line = inkOf('line');
    const axis =
        {gridcolor: line, zeroline: false, linecolor: line, automargin: false, fixedrange: false};
    const layout = {
      margin: {...MARGIN, pad: 2},
      paper_bgcolor: 'rgba(0,0,0,0)',
      plot_bgcolor: 'rgba(0,0,0,0)',
      font: {color: soft, size: 11},
      showlegend: false,
      hovermode: false,
      dragmode: 'zoom',
      barmode: 'stack',
      bargap: 0.18,
      uirevision: 'same',
      autosize: true,
      xaxis: {
        ...axis,
        showgrid: false,
        range: this.group.range ?? undefined,
        autorange: !this.group.range,
        nticks: 6
      },
      yaxis: {
        ...axis,
        type: log && !stacked ? 'log' : 'linear',
        nticks: 5,
        range: stacked ? undefined :
                         reach(series.flatMap(one => [...one.y, ...(one.raw ?? [])]), log),
        autorange: stacked,
        fixedrange: true,
        exponentformat: 'e'
      },
    };
    const traces = series.flatMap(one => {
      if (stacked)
        return [{type: 'bar', x: one.x, y: one.y, marker: {color: one.color, line: {width: 0}}}];
      const made = {
        type: 'scatter',
        mode: one.x.length === 1 ? 'markers' : 'lines',
        x: one.x,
        y: one.y,
        line: {color: one.color, width: 1.7},
        marker: {color: one.color}
      };
      return one.raw ? [{...made, y: one.raw, opacity: 0.28}, made] : [made];
    });
    plotly.react(
        this.face, traces, layout, {displayModeBar: false, doubleClick: 'reset', showTips: false});
    if (!this.heard) {
      this.heard = true;
      this.face.on('plotly_relayout', told => this.zoomed(told));
    }
  }

  zoomed(told) {
    const [left, right] = [told['xaxis.range[0]'], told['xaxis.range[1]']];
    if (left !== undefined)
      this.group.zoom([left, right]);
    else if (told['xaxis.autorange'])
      this.group.zoom(null);
  }

  axis = () => this.face._fullLayout?.xaxis;
  place = x => (this.axis() ? this.axis()._offset + this.axis().l2p(x) : null);
  value = at => (this.axis() ? this.axis().p2l(at - this.axis()._offset) : null);
  resize = () => plotly.Plots.resize(this.face) && true;
  zoom = range =>
      plotly.relayout(this.face, range? {'xaxis.range': range}: {'xaxis.autorange': true});
  close = () => plotly.purge(this.face);
}


export const drawer = (face, group) => (plotly ? new Plotly(face, group) : new Plain(face));
