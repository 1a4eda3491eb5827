// SPDX-License-Identifier: Apache-2.0
// Three ceilings of one tile: the formulas of common/roofline.py, which the tests compare it with.
"use strict";

(() => {
  const OPERAND_BYTES = 2;
  const ACCUMULATOR_BYTES = 4;

  // Operand elements that one CTA reads for a (rows x depth) by (depth x columns) product.
  function operands(rows, columns, depth, { ctas, piece }, aInTmem) {
    const a = aInTmem ? 0 : (Math.ceil(columns / piece) * rows * depth) / ctas;
    return a + (Math.ceil(rows / (piece * ctas)) * columns * depth) / ctas;
  }

  // Bytes through the port of shared memory, forward: both operands of Q K^T, V alone of P V.
  function forwardBytes(m, n, d, how) {
    const elements = operands(m, n, d, how, false) + operands(m, d, n, how, true);
    return [["MMA operands", elements * OPERAND_BYTES]];
  }

  function backwardBytes(m, n, d, how) {
    const elements =
      2 * operands(n, m, d, how, false) + 2 * operands(n, d, m, how, true) +
      operands(m, d, n, how, false);
    const ds = (m * n * OPERAND_BYTES) / how.ctas;
    const parts = [["MMA operands", elements * OPERAND_BYTES], ["dS written", ds]];
    if (how.ctas === 2) parts.push(["dS to the peer", (how.passes * ds) / 2]);
    return [...parts, ["dQ written and read", (2 * m * d * ACCUMULATOR_BYTES) / how.ctas]];
  }

  // Cycles by resource, parts of shared memory, ceilings in TFLOP/s and what bounds one CTA.
  // tile: {m, n, d} of the CTA, or of both CTAs of a pair; how: {backward, ctas, piece, passes}.
  function ceilings(machine, { m, n, d }, how) {
    const flop = ((how.backward ? 10 : 4) * m * n * d) / how.ctas;
    const bytes = (how.backward ? backwardBytes : forwardBytes)(m, n, d, how);
    const parts = bytes.map(([name, size]) => [name, size / machine.smem]);
    const cycles = {
      mma: flop / machine.tensor,
      smem: parts.reduce((sum, [, size]) => sum + size, 0),
      exp: (m * n) / how.ctas / machine.mufu,
    };
    const most = Math.max(...Object.values(cycles));
    const rate = (flop * machine.clock * machine.sms) / 1e12;
    const names = Object.keys(cycles);
    return {
      cycles,
      parts,
      bound: names.filter((name) => cycles[name] === most),
      tensorCeiling: cycles.mma / most,
      tflops: Object.fromEntries(names.map((name) => [name, rate / cycles[name]])),
    };
  }

  if (typeof module !== "undefined") module.exports = { ceilings };
  if (typeof document === "undefined") return;

  const NAMES = { mma: "tensor core", smem: "shared memory", exp: "exponentials" };
  const KERNELS = {
    "forward": { backward: false, ctas: 1 },
    "forward, pair": { backward: false, ctas: 2 },
    "backward": { backward: true, ctas: 1 },
    "backward, pair": { backward: true, ctas: 2 },
  };

  function bars(cycles) {
    const { shape } = flWidget;
    const most = Math.max(...Object.values(cycles));
    const parts = Object.entries(cycles).flatMap(([name, size], row) => {
      const y = 4 + 26 * row;
      return [
        shape("text", { x: 0, y: y + 13 }, NAMES[name]),
        shape("rect", { class: name, x: 84, y, width: (200 * size) / most, height: 18 }),
        shape("text", { x: 90 + (200 * size) / most, y: y + 13 }, String(Math.round(size))),
      ];
    });
    const words = ([name, size]) => `${NAMES[name]} ${Math.round(size)}`;
    const label = Object.entries(cycles).map(words).join(", ");
    const attributes = { viewBox: "0 0 360 82", role: "img", "aria-label": label };
    return shape("svg", attributes, ...parts);
  }

  function sentence({ bound, tensorCeiling, tflops }) {
    const names = bound.map((name) => NAMES[name]).join(" and ");
    const share = Math.round(100 * tensorCeiling);
    const lowest = Math.round(Math.min(...Object.values(tflops)));
    return `Bound by ${names}. The tensor core can be busy ${share} % of the time at most: ` +
      `${lowest} TFLOP/s (derived, no time on a GPU).`;
  }

  function ofThePort(parts) {
    const port = parts.map(([name, size]) => `${name} ${Math.round(size)}`).join(", ");
    return `Cycles of shared memory: ${port}.`;
  }

  function start(root, settings) {
    const { element, slider, choice } = flWidget;
    const { piece, multiple, maxTile } = settings;
    const table = root.querySelector("table");
    const [drawn, said, detail] = [element("div"), flWidget.status(), element("p")];
    const [tileRow, rateRow] = [0, 1].map(() => element("div", { class: "fl-controls" }));
    const first = Object.keys(settings.machines)[0];
    const now = { kernel: "forward", machine: { ...settings.machines[first] } };

    function update() {
      const how = { ...KERNELS[now.kernel], piece, passes: settings.passes };
      const found = ceilings(now.machine, now.tile, how);
      drawn.replaceChildren(bars(found.cycles));
      said.textContent = sentence(found);
      detail.textContent = ofThePort(found.parts);
      flWidget.fillTable(table, Object.keys(NAMES).map((name) => [
        NAMES[name], String(Math.round(found.cycles[name])), String(Math.round(found.tflops[name])),
      ]));
      const { m, n, d } = now.tile;
      const tile = `${m} queries, ${n} keys, head dim ${d}`;
      flWidget.setCaption(table, `${now.kernel}, ${tile}: of one CTA`);
    }

    const moving = (kept, key) => (value) => { kept[key] = value; update(); };

    // The rows of an MMA come in whole pieces: queries forward, keys backward, of both CTAs.
    function newKernel(kernel) {
      const { backward, ctas } = KERNELS[kernel];
      const rows = piece * ctas;
      now.kernel = kernel;
      now.tile = backward ? { m: piece, n: rows, d: 128 } : { m: rows, n: piece, d: 128 };
      const m = { min: backward ? piece : rows, max: maxTile, step: backward ? piece : rows };
      const n = { min: backward ? rows : multiple, max: maxTile, step: backward ? rows : multiple };
      const d = { min: multiple, max: settings.maxHeadDim, step: multiple };
      tileRow.replaceChildren(
        slider("queries", { ...m, value: now.tile.m }, moving(now.tile, "m")),
        slider("keys", { ...n, value: now.tile.n }, moving(now.tile, "n")),
        slider("head dim", { ...d, value: now.tile.d }, moving(now.tile, "d")),
      );
      update();
    }

    function newMachine(name) {
      now.machine = { ...settings.machines[name] };
      const labels = { tensor: "FLOP a cycle", smem: "bytes a cycle", mufu: "exp2 a cycle" };
      const rate = ([key, [min, max, step]]) => {
        const range = { min, max, step, value: now.machine[key] };
        return slider(labels[key], range, moving(now.machine, key));
      };
      rateRow.replaceChildren(...Object.entries(settings.sliders).map(rate));
      update();
    }

    root.prepend(
      element("div", { class: "fl-controls" },
        choice("kernel", Object.keys(KERNELS), newKernel),
        choice("machine", Object.keys(settings.machines), newMachine)),
      tileRow, rateRow, drawn, said, detail,
    );
    newKernel(now.kernel);
    newMachine(first);
  }

  flWidget.mount("ceilings", start);
})();
