// Elements made from data. Text from outside enters as text nodes only, styles through the CSS object model only.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element; attributes `on…` are listeners, `--…` custom properties. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, made in the same way. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Replaces what an element holds. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

/** Sets an attribute only where it differs; `null` removes it. */
export function attribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Calls `action(event)` when a pointer moves over an element; what moves below a pointer that rests does not count. */
export function onPointer(element, action) {
  element.addEventListener("mousemove", (event) => {
    if (event.movementX || event.movementY) action(event);
  });
}

/** Calls `action` once, `delay` milliseconds after the last call. */
export function debounced(action, delay) {
  let timer = 0;
  const call = (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), delay);
  };
  call.cancel = () => clearTimeout(timer);
  return call;
}
