// Building and updating the page's elements. Text only ever enters as text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

/** Touches the page only when the text differs, so that selections and screen readers rest. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** A list whose entries are kept from one update to the next by their key. */
export class KeyedList {
  /** `create(key)` returns a view: an object with a `root` element and `update(item)`. */
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.views = new Map();
  }

  /** Shows exactly `items`, in this order. */
  update(items, keyOf) {
    const gone = new Set(this.views.keys());
    items.forEach((item, index) => {
      const key = keyOf(item);
      gone.delete(key);
      let view = this.views.get(key);
      if (!view) {
        view = this.create(key);
        this.views.set(key, view);
      }
      view.update(item);
      const there = this.parent.children[index] ?? null;
      if (there !== view.root) this.parent.insertBefore(view.root, there);
    });
    for (const key of gone) {
      this.views.get(key).root.remove();
      this.views.delete(key);
    }
  }
}
