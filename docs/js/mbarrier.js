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

  // Who steps next in turn: MMA if it can, else the copy engine, else LOAD; undefined if nobody can.
  function inTurn(ring, settings) {
    const can = (role) => act(structuredClone(ring), role, settings).result !== "blocked";
    return [...settings.roles].reverse().find(can);
  }

  // The roles of the first `count` steps in turn, as far as anybody can take one.
  function turns(settings, bug, count) {
    const [ring, taken] = [begin(settings, bug), []];
    while (taken.length < count) {
      const role = inTurn(ring, settings);
      if (role === undefined) break;
      act(ring, role, settings);
      taken.push(role);
    }
    return taken;
  }

  // Results and barriers after each step of a list of roles.
  function replay(settings, bug, roles) {
    const ring = begin(settings, bug);
    return roles.map((role) => {
      const { result } = act(ring, role, settings);
      const numbers = ({ phase, pending, tx }) => [phase, pending, tx];
      return { result, hazard: ring.hazard, barriers: all(ring).map(numbers) };
    });
  }

  const all = (ring) => [...ring.full, ...ring.empty];

  const row = (barrier) => [
    barrier.name, ...[barrier.phase, barrier.pending, barrier.tx].map(String),
    ...[0, 1].map((parity) => (passes(barrier, parity) ? "passes" : "waits")),
  ];

  if (typeof module !== "undefined") module.exports = { replay, turns };
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

  // What a step of `role` did, in words; before: the phases of the barriers before it.
  function sentence(ring, role, { result, words }, before) {
    const ended = all(ring).filter((barrier, i) => barrier.phase !== before[i]);
    const over = ({ name, phase }) => ` Phase ${phase - 1} of ${name} ends.`;
    const what = result === "blocked" ? blockedAt(ring, role) : words;
    const said = result === "fault" ? `Fault, ${what}. Restart` : `${role} ${what}`;
    return `${said}.${ended.map(over).join("")} ${HAZARDS[ring.hazard] ?? ""}`.trim();
  }

  // The ring before each step and after the last, with words; `at` is the one that is shown.
  class Steps {
    constructor(settings, bug) {
      const planted = settings.bugs[bug] ? ` Planted: ${settings.bugs[bug]}.` : "";
      const words = `A fresh ring: no phase is over, and a wait for parity 1 passes.${planted}`;
      [this.settings, this.at] = [settings, 0];
      this.rings = [{ ring: begin(settings, bug), words }];
    }

    // A step of `role` from the ring that is shown, which forgets those behind it; its words.
    take(role) {
      const { ring: earlier } = this.rings[this.at];
      const ring = structuredClone(earlier);
      const before = all(ring).map((barrier) => barrier.phase);
      const done = act(ring, role, this.settings);
      const words = sentence(ring, role, done, before);
      if (done.result === "blocked" || earlier.fault) return words;
      this.rings.splice(this.at + 1, Infinity, { ring, words });
      return this.move(1);
    }

    // Forward in turn where no step lies ahead.
    move(steps) {
      const last = this.rings.length - 1;
      if (steps === 1 && this.at === last) {
        const role = inTurn(this.rings[last].ring, this.settings);
        return role === undefined ? "Nobody can take a step: all wait." : this.take(role);
      }
      this.at = Math.min(Math.max(this.at + steps, 0), last);
      const { words } = this.rings[this.at];
      return this.at ? `Step ${this.at}: ${words}` : words;
    }
  }

  function start(root, settings) {
    const { element, button, choice } = flWidget;
    const table = root.querySelector("table");
    const told = flWidget.status();
    let [bug, steps] = ["no bug", null];
    const drawn = flWidget.figure("steps taken", (count) => update(steps.move(count)));

    function update(words) {
      const { ring } = steps.rings[steps.at];
      flWidget.showStep(drawn, picture(ring, settings), steps.at, steps.rings.length - 1);
      told.textContent = words;
      flWidget.fillTable(table, all(ring).map(row));
      flWidget.setCaption(table, "the barriers now");
    }

    function restart(chosen) {
      [bug, steps] = [chosen, new Steps(settings, chosen)];
      update(steps.move(0));
    }

    const next = (role) => {
      const made = button(role, () => update(steps.take(role)));
      return flWidget.fill(made, { "aria-label": `next step of ${role}` }, []);
    };
    root.prepend(
      element("div", { class: "fl-controls" },
        choice("bug", Object.keys(settings.bugs), restart),
        button("Next in turn", () => update(steps.move(1))),
        button("Back", () => update(steps.move(-1))),
        button("Restart", () => restart(bug))),
      element("div", { class: "fl-controls" }, "next step of", ...settings.roles.map(next)),
      drawn, told,
    );
    restart(bug);
  }

  flWidget.mount("mbarrier", start);
})();
