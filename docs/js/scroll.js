// SPDX-License-Identifier: Apache-2.0
// What scrolls sideways can be reached with Tab and has a name while it is wider than its place.
// Fenced code is left out: Material for MkDocs does this for it.
"use strict";

(() => {
  const KINDS = {
    ".fl-roles": "graph of the roles",
    ".fl-timeline": "timeline",
    ".fl-diff .highlight": "changed lines",
    ".fl-code > .highlight": "source",
    ".fl-api .highlight": "signature",
    ".md-typeset__scrollwrap": "table",
  };

  // The name of a part: what kind it is, and its caption without the mark.
  function name(part, kind) {
    const before = part.previousElementSibling;
    const inside = part.querySelector("caption, .fl-caption");
    const caption = inside ?? (before?.matches(".fl-caption") ? before : null);
    const words = caption?.textContent.trim().replace(/\s+[MDQ]$/, "");
    return `${words ? `${kind}: ${words}` : kind}, scrolls sideways`;
  }

  function update(part, kind) {
    const wide = part.scrollWidth > part.clientWidth;
    const attributes = { tabindex: 0, role: "group", "aria-label": name(part, kind) };
    for (const [key, value] of Object.entries(attributes)) {
      if (wide) part.setAttribute(key, value);
      else part.removeAttribute(key);
    }
  }

  // Behind the load event: by then the theme has put its frames around tables.
  window.addEventListener("load", () => {
    for (const [selector, kind] of Object.entries(KINDS)) {
      for (const part of document.querySelectorAll(selector)) {
        new ResizeObserver(() => update(part, kind)).observe(part);
      }
    }
  });
})();
