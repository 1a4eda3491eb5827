// SPDX-License-Identifier: Apache-2.0
// mbarriers of a ring of slots, step by step: rules of the PTX ISA, section 9.7.13.15.
// The same as common/primers/ring.py on common/model/barrier.py, which the tests compare it with.
"use strict";

(() => {
  const fresh = (name, count) => ({ name, count, pending: count, tx: 0, phase: 0 });

  // A phase ends when no arrival and no byte is to come; the next one starts with all arrivals.
  function endPhase(barrier) {
    if (barrier.pending !== 0 || barrier.tx !== 0) return;
    barrier.phase += 1;
    barrier.pending = barrier.count;
  }

  function arrive(barrier) {
    if (barrier.pending === 0) throw new Error(`one arrival too many at ${barrier.name}`);
    barrier.pending -= 1;
    endPhase(barrier);
  }

  function addBytes(barrier, size) {
    barrier.tx += size;
    endPhase(barrier);
  }

  // A wait for a parity passes when the phase of that parity is over; on a fresh barrier 1 does.
  const passes = (barrier, parity) => barrier.phase % 2 !== parity;

  function begin(settings, bug) {
    const slots = Array.from({ length: settings.slots }, (_, slot) => slot);
    const first = bug === "LOAD starts with parity 0" ? 0 : 1;
    return {
      bug,
      full: slots.map((slot) => fresh(`full[${slot}]`, 1)),
      empty: slots.map((slot) => fresh(`empty[${slot}]`, 1)),
      load: { tile: 0, slot: 0, parity: first, waited: false },
      mma: { tile: 0, slot: 0, parity: 0, waited: false },
      copies: [],
      holds: slots.map(() => ({ tile: null, parts: 0, unread: false })),
      hazard: "",
      fault: "",
    };
  }

  function advance(role, slots) {
    role.tile += 1;
    role.waited = false;
    role.slot = (role.slot + 1) % slots;
    if (role.slot === 0) role.parity = 1 - role.parity;
  }

  // A role's wait at `barrier`: the words for it, or null when it is blocked.
  function wait(role, barrier) {
    if (!passes(barrier, role.parity)) return null;
    role.waited = true;
    return `passes its wait at ${barrier.name} for parity ${role.parity}`;
  }

  function load(ring, { slots, bytes, parts }) {
    const { load: role, holds } = ring;
    const slot = role.slot;
    if (!role.waited && ring.bug === "LOAD does not wait for empty") {
      role.waited = true;
      return "does not wait";
    }
    if (!role.waited) return wait(role, ring.empty[slot]);
    const expected = ring.bug === "LOAD expects half of the bytes" ? bytes / 2 : bytes;
    addBytes(ring.full[slot], expected);
    arrive(ring.full[slot]);
    if (holds[slot].unread) ring.hazard = "overwritten";
    const words = `arrives at full[${slot}], expects ${expected} bytes, copies tile ${role.tile}`;
    holds[slot] = { tile: role.tile, parts: 0, unread: true };
    ring.copies.push({ slot, left: parts });
    advance(role, slots);
    return words;
  }

  function copy(ring, { bytes, parts }) {
    if (!ring.copies.length) return null;
    const { slot } = ring.copies[0];
    ring.copies[0].left -= 1;
    if (!ring.copies[0].left) ring.copies.shift();
    ring.holds[slot].parts += 1;
    addBytes(ring.full[slot], -bytes / parts);
    return `delivers ${bytes / parts} bytes to slot ${slot} and counts them at full[${slot}]`;
  }

  function mma(ring, { slots, parts }) {
    const { mma: role, holds } = ring;
    const slot = role.slot;
    if (!role.waited) return wait(role, ring.full[slot]);
    if (holds[slot].parts < parts) ring.hazard = "incomplete";
    holds[slot].unread = false;
    advance(role, slots);
    const words = `reads tile ${holds[slot].tile} in slot ${slot}`;
    if (ring.bug === "MMA does not arrive at empty") return words;
    arrive(ring.empty[slot]);
    return `${words}, arrives at empty[${slot}]`;
  }

  const STEPS = { "LOAD": load, "copy engine": copy, "MMA": mma };

  // One step of `role`, which changes the ring: {result: done, blocked or fault, words}. Nothing
  // goes on after a fault.
  function act(ring, role, settings) {
    try {
      if (!ring.fault) {
        const words = STEPS[role](ring, settings);
        return { result: words === null ? "blocked" : "done", words };
      }
    } catch (error) {
      ring.fault = error.message;
    }
    return { result: "fault", words: ring.fault };
  }

  // Results and barriers after each step of a list of roles.
  function replay(settings, bug, roles) {
    const ring = begin(settings, bug);
    return roles.map((role) => {
      const { result } = act(ring, role, settings);
      const numbers = ({ phase, pending, tx }) => [phase, pending, tx];
      return { result, hazard: ring.hazard, barriers: [...ring.full, ...ring.empty].map(numbers) };
    });
  }

  const row = (barrier) => [
    barrier.name, ...[barrier.phase, barrier.pending, barrier.tx].map(String),
    ...[0, 1].map((parity) => (passes(barrier, parity) ? "passes" : "waits")),
  ];

  if (typeof module !== "undefined") module.exports = { replay };
  if (typeof document === "undefined") return;

  const HAZARDS = {
    overwritten: "LOAD overwrites a tile that MMA has not read.",
    incomplete: "MMA reads a tile of which a part has not come.",
  };

  // What keeps a role waiting.
  function blockedAt(ring, role) {
    if (role === "copy engine") return "has nothing to copy";
    const [state, barriers] = role === "LOAD" ? [ring.load, ring.empty] : [ring.mma, ring.full];
    const { name, phase } = barriers[state.slot];
    return `is blocked: it waits at ${name} for parity ${state.parity}, phase ${phase} is not over`;
  }

  function picture(ring, { parts }) {
    const { shape } = flWidget;
    const said = ({ tile, parts: come }, slot) =>
      `slot ${slot}: ` + (tile === null ? "nothing yet" : `tile ${tile}, ${come} of ${parts} parts`);
    const shapes = ring.holds.flatMap((held, slot) => {
      const x = 4 + 178 * slot;
      const kind = held.unread ? "smem" : "faint";
      const width = (170 * held.parts) / parts;
      return [
        shape("rect", { x, y: 4, width: 170, height: 30 }),
        shape("rect", { class: kind, x, y: 4, width, height: 30 }),
        shape("text", { x: x + 6, y: 23 }, said(held, slot)),
      ];
    });
    const label = ring.holds.map(said).join("; ");
    const attributes = { viewBox: "0 0 360 38", role: "img", "aria-label": label };
    return shape("svg", attributes, ...shapes);
  }

  function start(root, settings) {
    const { element, button, choice } = flWidget;
    const table = root.querySelector("table");
    const [drawn, told] = [element("div"), element("output", { "aria-live": "polite" })];
    let ring = begin(settings, "no bug");
    const buttons = settings.roles.map((role) => button(role, () => stepBy(role)));
    const all = () => [...ring.full, ...ring.empty];

    function update(words) {
      drawn.replaceChildren(picture(ring, settings));
      told.textContent = words;
      flWidget.fillTable(table, all().map(row));
      flWidget.setCaption(table, "the barriers now");
    }

    function stepBy(role) {
      const before = all().map((barrier) => barrier.phase);
      const { result, words } = act(ring, role, settings);
      const ended = all().filter((barrier, i) => barrier.phase !== before[i]);
      const over = ({ name, phase }) => ` Phase ${phase - 1} of ${name} ends.`;
      const done = ended.map(over).join("");
      const what = result === "blocked" ? blockedAt(ring, role) : words;
      const said = result === "fault" ? `Fault, ${what}. Restart` : `${role} ${what}`;
      update(`${said}.${done} ${HAZARDS[ring.hazard] ?? ""}`);
    }

    function restart(bug) {
      ring = begin(settings, bug);
      const planted = settings.bugs[bug] ? `Planted: ${settings.bugs[bug]}.` : "";
      update(`A fresh ring: no phase is over, and a wait for parity 1 passes. ${planted}`);
    }

    root.prepend(
      element("div", { class: "fl-controls" },
        choice("bug", Object.keys(settings.bugs), restart),
        button("Restart", () => restart(ring.bug))),
      element("div", { class: "fl-controls" }, "next step of", ...buttons),
      drawn, told,
    );
    restart(ring.bug);
  }

  flWidget.mount("mbarrier", start);
})();
