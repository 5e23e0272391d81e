// Helpers that build DOM elements. Untrusted text becomes text nodes only, and styles are set through the CSSOM only, as the
// page's Content-Security-Policy requires.

const SVG = "http://www.w3.org/2000/svg";

const rendered = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...rendered(children));
  return element;
}

/** Creates an HTML element; attributes `on…` are event listeners, `--…` CSS custom properties. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Creates an SVG element in the same way. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Replaces an element's children, leaving out `null`, `undefined` and `false`. */
export function setChildren(element, ...children) {
  element.replaceChildren(...rendered(children));
}

/** Sets an attribute unless it already has this value; `null` removes it. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Calls `action(event)` when the pointer moves over an element, but not when the element scrolls below a resting pointer. */
export function onPointer(element, action) {
  element.addEventListener("mousemove", (event) => {
    if (event.movementX || event.movementY) action(event);
  });
}

/** Returns a function that calls `action` once, `delay` milliseconds after its last call. */
export function debounced(action, delay) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), delay);
  };
}
