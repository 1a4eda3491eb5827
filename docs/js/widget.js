// SPDX-License-Identifier: Apache-2.0
// What the interactive parts of the primers share: making elements, and starting on a page that has
// the part. Pages without it are left alone.
"use strict";

const flWidget = {
  // An HTML element with attributes and children; "onclick" and the like are listeners.
  element(tag, attributes = {}, ...children) {
    return flWidget.fill(document.createElement(tag), attributes, children);
  },

  // The same for a shape of an SVG.
  shape(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    return flWidget.fill(node, attributes, children);
  },

  fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  },

  // A slider with its label and value; tells `changed` the number. Its name is the label alone.
  slider(label, { min, max, step, value }, changed) {
    const shown = flWidget.element("b", { "aria-hidden": "true" }, String(value));
    const input = flWidget.element("input", {
      type: "range", min, max, step, value,
      oninput: () => {
        shown.textContent = input.value;
        changed(Number(input.value));
      },
    });
    return flWidget.element("label", {}, label, input, shown);
  },

  // A choice among `names`; tells `changed` the name.
  choice(label, names, changed) {
    const options = names.map((name) => flWidget.element("option", { value: name }, name));
    const select = flWidget.element(
      "select", { onchange: () => changed(select.value) }, ...options
    );
    return flWidget.element("label", {}, label, select);
  },

  button(text, onclick) {
    return flWidget.element("button", { type: "button", onclick }, text);
  },

  // The text that a screen reader says when it changes, wherever the focus is.
  status() {
    return flWidget.element("output", { "aria-live": "polite" });
  },

  // A figure that arrow keys move: tells `go` by how many steps, −∞ for the first, ∞ for the last.
  // A slider for assistive means, which leave the arrow keys to it.
  figure(label, go) {
    const steps = {
      ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, Home: -Infinity, End: Infinity,
    };
    return flWidget.element("div", {
      class: "fl-figure", role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": 0,
      title: "Keys: ← and → step, Home and End go to the first and the last step",
      onkeydown: (event) => {
        if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        go(steps[event.key]);
      },
    });
  },

  // Draws into such a figure and says at which step it stands, of how many.
  showStep(figure, picture, step, last) {
    const words = `step ${step} of ${last}: ${picture.getAttribute("aria-label")}`;
    const values = { "aria-valuenow": step, "aria-valuemax": last, "aria-valuetext": words };
    flWidget.fill(figure, values, []).replaceChildren(picture);
  },

  // Replaces the rows of a table's body by `rows`, arrays of texts.
  fillTable(table, rows) {
    const cells = (row) => row.map((cell) => flWidget.element("td", {}, cell));
    const made = rows.map((row) => flWidget.element("tr", {}, ...cells(row)));
    table.tBodies[0].replaceChildren(...made);
  },

  // Changes the words of a table's caption and leaves the mark behind them.
  setCaption(table, words) {
    table.caption.firstChild.data = `${words}\u00a0`;
  },

  // Calls start(root, settings) if the page has an element #fl-NAME; what is for readers without
  // scripts goes.
  mount(name, start) {
    const root = document.getElementById(`fl-${name}`);
    if (!root) return;
    root.querySelector(".fl-static").remove();
    start(root, JSON.parse(root.dataset.settings));
  },
};
