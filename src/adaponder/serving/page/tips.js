// Tooltips for pointer, touch and keyboard: an element with `data-tip` shows its text in a box beside it.

import { h } from "./dom.js";

const GAP = 8; // px, also to the edge of the window

/** Returns the attributes of an element with a tooltip, which can be hovered, tapped or focused. */
export const explained = (text) => ({ "data-tip": text, tabindex: "0" });

/** Shows tooltips on hover, tap and focus; hides them when the pointer leaves, on another tap, Escape or scrolling. */
export function startTips() {
  const box = document.body.appendChild(h("div", { class: "tip", id: "tip", role: "tooltip", hidden: true }));
  let owner = null;
  const show = (element) => {
    owner?.removeAttribute("aria-describedby");
    owner = element;
    box.hidden = !element;
    if (!element) return;
    element.setAttribute("aria-describedby", box.id);
    box.textContent = element.dataset.tip;
    const [at, tip] = [element.getBoundingClientRect(), box.getBoundingClientRect()];
    const left = Math.min(at.left, document.documentElement.clientWidth - tip.width - GAP);
    const below = at.bottom + GAP + tip.height <= innerHeight;
    box.style.left = `${Math.max(GAP, left)}px`;
    box.style.top = `${below ? at.bottom + GAP : Math.max(GAP, at.top - GAP - tip.height)}px`;
  };
  const ownerOf = ({ target }) => target.closest?.("[data-tip]") ?? null;
  addEventListener("pointerover", (event) => event.pointerType === "mouse" && show(ownerOf(event)));
  addEventListener("click", (event) => {
    // A tap on a button runs its action and shows no tooltip.
    const element = ownerOf(event);
    show(element?.tagName === "BUTTON" ? null : element);
  });
  addEventListener("focusin", (event) => event.target.matches(":focus-visible") && show(ownerOf(event)));
  addEventListener("focusout", () => show(null));
  addEventListener("keydown", (event) => event.key === "Escape" && show(null));
  addEventListener("scroll", () => show(null), { capture: true, passive: true });
}
