// Elements, and turning one tree into another without losing focus, scroll or hover.

const SVG = "http://www.w3.org/2000/svg";
const IN_SVG = new Set(["svg", "g", "path", "line", "text", "rect", "circle", "polyline", "polygon"]);

/** An element. `style` is a table (set by the object model, as the content policy demands). */
export function h(name, props, ...children) {
  const node = IN_SVG.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else if (key === "value" && name !== "option") node.value = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  put(node, children);
  return node;
}

function put(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === "") continue;
    if (Array.isArray(child)) put(node, child);
    else node.append(child instanceof Node ? child : String(child));
  }
}

export const byId = (id) => document.getElementById(id);

/** Make `old` look like `fresh`. Children with `data-key` are matched by it, others by their place. */
export function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  syncAttributes(old, fresh);
  if (!fresh.hasAttribute("data-keep")) syncChildren(old, fresh);
}

function syncAttributes(old, fresh) {
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && !fresh.hasAttribute(name) && !name.startsWith("data-own")) old.removeAttribute(name);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
}

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);
const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

function syncChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.childNodes) if (keyOf(child) !== null) keyed.set(keyOf(child), child);
  let place = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    const known = key !== null ? keyed.get(key) : null;
    if (known && known !== place && known.nodeName === wanted.nodeName) {
      old.insertBefore(known, place);
      morph(known, wanted);
    } else if (place && alike(place, wanted)) {
      const next = place.nextSibling;
      morph(place, wanted);
      place = next;
    } else {
      old.insertBefore(wanted, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

/** Put a tree in place of what `holder` has. */
export function show(holder, ...children) {
  const fresh = holder.cloneNode(false);
  put(fresh, children);
  syncChildren(holder, fresh);
}
