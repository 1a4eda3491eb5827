// SPDX-License-Identifier: Apache-2.0
// The stepper of the primer on online softmax: one row of scores arrives tile by tile.
// The arithmetic is that of common/primers/softmax.py, which the tests compare it with.
"use strict";

(() => {
  const begin = { m: -Infinity, l: 0, o: 0, alpha: 1, top: -Infinity, largestP: 0 };

  // The state after one more tile; scores, m and threshold in log2 units.
  function step(state, scores, values, threshold) {
    const top = Math.max(state.top, ...scores);
    const moves = !(state.m - top >= -threshold);
    const m = moves ? top : state.m;
    const alpha = moves ? 2 ** (state.m - m) : 1;
    const p = scores.map((score) => 2 ** (score - m));
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    return {
      m,
      l: state.l * alpha + sum(p),
      o: state.o * alpha + sum(p.map((x, i) => x * values[i])),
      alpha,
      top,
      largestP: Math.max(...p),
    };
  }

  // The state after each tile of `keys` scores.
  function run(scores, values, keys, threshold) {
    const states = [];
    for (let first = 0; first < scores.length; first += keys) {
      const tile = [scores, values].map((row) => row.slice(first, first + keys));
      states.push(step(states.at(-1) ?? begin, ...tile, threshold));
    }
    return states;
  }

  // How often l and O had to be rescaled: m moved, and there was something already.
  const rescales = (states) => states.slice(1).filter((state) => state.alpha !== 1).length;

  // The output by the definition, with all scores at hand.
  function definition(scores, values) {
    const top = Math.max(...scores);
    const p = scores.map((score) => 2 ** (score - top));
    const l = p.reduce((a, b) => a + b, 0);
    return p.reduce((sum, x, i) => sum + x * values[i], 0) / l;
  }

  if (typeof module !== "undefined") module.exports = { run, rescales, definition };
  if (typeof document === "undefined") return;

  const show = (x) => (x === 0 ? "0" : String(Number(x.toPrecision(4))));

  // Scores as bars, what has come in colour; m as a line.
  function picture(scores, keys, tiles, states) {
    const { shape } = flWidget;
    const [low, high] = [Math.min(0, ...scores) - 1, Math.max(...scores) + 1];
    const y = (score) => 8 + (104 * (high - score)) / (high - low);
    const width = 340 / scores.length;
    const parts = scores.map((score, i) => {
      const [top, bottom] = [Math.min(y(score), y(0)), Math.max(y(score), y(0))];
      const tile = Math.floor(i / keys);
      const kind = tile >= tiles ? "faint" : tile === tiles - 1 ? "exp" : "mma";
      const gap = (tile * 12) / (scores.length / keys);
      return shape("rect", {
        class: kind, x: 4 + i * width + gap, y: top, width: width - 3,
        height: Math.max(1, bottom - top),
      });
    });
    if (tiles) {
      const m = states[tiles - 1].m;
      parts.push(shape("line", { class: "tmem", x1: 0, x2: 360, y1: y(m), y2: y(m) }));
      parts.push(shape("text", { class: "small", x: 2, y: y(m) > 20 ? y(m) - 3 : y(m) + 10 }, "m"));
    }
    const label = `${scores.length} scores, ${tiles} tiles have come`;
    return shape("svg", { viewBox: "0 0 360 120", role: "img", "aria-label": label }, ...parts);
  }

  // What the last tile did, in words.
  function sentence(tiles, states, threshold) {
    const tile = `Tile ${tiles} of ${states.length}`;
    if (!tiles) return "Nothing has come yet: m = −∞, l = 0, O = 0.";
    const [now, before] = [states[tiles - 1], states[tiles - 2]];
    if (!before) return `${tile}: m is its largest score, ${show(now.m)}. Nothing to rescale yet.`;
    const above = show(now.top - before.m);
    if (now.alpha === 1 && now.top <= before.m) {
      return `${tile}: no score exceeds m. m stays, α = 1.`;
    }
    if (now.alpha === 1) {
      const near = `lies ${above} above m, not more than ${threshold}`;
      return `${tile}: the largest score so far ${near}. m stays, α = 1.`;
    }
    const shrink = `l and O shrink by α = 2^−${above}`;
    return `${tile}: a score lies ${above} above m. m moves, and ${shrink}.`;
  }

  function ending(scores, values, states) {
    const [last, wanted] = [states.at(-1), definition(scores, values)];
    const difference = Math.abs(last.o / last.l - wanted);
    const rounding = difference ? `${difference.toExponential(0)}, rounding of float64` : "0";
    const output = ` Output O / l = ${show(last.o / last.l)}; by the definition ${show(wanted)}`;
    return `${output}; difference ${rounding}.`;
  }

  function start(root, settings) {
    const { element, button, slider, choice } = flWidget;
    const now = { row: Object.keys(settings.rows)[0], tiles: 0, threshold: settings.threshold };
    const table = root.querySelector("table");
    const count = () => settings.values.length / settings.keys;
    const go = (tiles) => { now.tiles = Math.min(Math.max(tiles, 0), count()); update(); };
    const drawn = flWidget.figure("tiles that have come", (steps) => go(now.tiles + steps));
    const said = flWidget.status();
    const buttons = [
      button("Next tile", () => go(now.tiles + 1)),
      button("Back", () => go(now.tiles - 1)),
      button("All tiles", () => go(count())),
      button("Restart", () => go(0)),
    ];
    function update() {
      const scores = settings.rows[now.row];
      const states = run(scores, settings.values, settings.keys, now.threshold);
      const come = states.slice(0, now.tiles);
      const shown = picture(scores, settings.keys, now.tiles, states);
      flWidget.showStep(drawn, shown, now.tiles, count());
      const done = now.tiles === count() ? ending(scores, settings.values, states) : "";
      const what = sentence(now.tiles, states, now.threshold);
      said.textContent = `${what} Rescaled so far: ${rescales(come)}.${done}`;
      flWidget.fillTable(table, come.map((s, i) => [
        String(i + 1), ...[s.top, s.m, s.alpha, s.l, s.o, s.largestP].map(show),
      ]));
      flWidget.setCaption(table, `state after each tile, threshold ${now.threshold}`);
      // Not disabled: a button that the keyboard is on would lose it.
      buttons.forEach((one, i) => {
        one.setAttribute("aria-disabled", now.tiles === (i % 2 ? 0 : count()));
      });
    }
    const range = { min: 0, max: settings.maxThreshold, step: 1, value: now.threshold };
    const controls = [
      choice("row", Object.keys(settings.rows), (row) => { now.row = row; update(); }),
      slider("threshold, log2", range, (value) => { now.threshold = value; update(); }),
    ];
    root.prepend(
      element("div", { class: "fl-controls" }, ...buttons),
      element("div", { class: "fl-controls" }, ...controls),
      drawn,
      said,
    );
    update();
  }

  flWidget.mount("online-softmax", start);
})();
