// Building and updating elements. Text only ever becomes text: nothing here, or anywhere else, parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element: attributes by name (a value of null or false leaves one out), then children, elements or texts. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    set(element, name, value);
  }
  element.append(...children);
  return element;
}

/** Sets an attribute where it differs; null or false removes it. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

/** Sets an element's text where it differs, so that what has not changed keeps its selection and is not drawn again. */
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Shows an element, or hides it, from screen readers too. */
export function show(element, visible) {
  element.hidden = !visible;
}

/** A text that came from elsewhere: its writing direction stays its own. */
export function foreign(text = "") {
  return h("bdi", {}, text);
}

export const byId = (id) => document.getElementById(id);

const kept = new WeakMap();

/**
 * Makes a parent's children those of a list, keeping the element of an item that was there before.
 *
 * `build(item)` makes an item's element and what updates it, `[element, update]`; `update(item)` is called each time.
 */
export function keep(parent, items, keyOf, build) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  let cursor = null;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) {
      continue;
    }
    const made = before.get(key) ?? build(item);
    made[1](item);
    now.set(key, made);
  }
  for (const [key, [element]] of before) {
    if (!now.has(key)) {
      element.remove();
    }
  }
  for (const [element] of [...now.values()].reverse()) {
    if (element.parentNode !== parent || element.nextSibling !== cursor) {
      parent.insertBefore(element, cursor);
    }
    cursor = element;
  }
  kept.set(parent, now);
}
