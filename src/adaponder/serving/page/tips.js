// Tooltips for pointer, touch and keyboard: an element with `data-tip` shows that text in a box beside it.

import { h } from "./dom.js";

const GAP = 8; // px, to the element and to the window's edge

/** Returns the attributes that give an element a tooltip, on hover, tap and focus. */
export const tipAttributes = (text) => ({ "data-tip": text, tabindex: "0" });

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
    const [anchor, tip] = [element.getBoundingClientRect(), box.getBoundingClientRect()];
    const left = Math.min(anchor.left, document.documentElement.clientWidth - tip.width - GAP);
    const fitsBelow = anchor.bottom + GAP + tip.height <= innerHeight;
    box.style.left = `${Math.max(GAP, left)}px`;
    box.style.top = `${fitsBelow ? anchor.bottom + GAP : Math.max(GAP, anchor.top - GAP - tip.height)}px`;
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
