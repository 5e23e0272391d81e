"""The page of a server that asks for a key."""

from __future__ import annotations

from explorer_support import Explorer, serving

KEY = "a-key-of-many-characters"


def test_the_page_opens_once_the_key_was_given(browser):
    context = browser.new_context()
    context.set_default_timeout(15_000)
    with serving(key=KEY) as address:
        explorer = Explorer(context, address)
        page = explorer.page
        assert page.goto(address).status == 401
        page.fill("#key", "not-the-key-of-this-server")
        page.click("button")
        assert page.get_by_role("status").inner_text() == "That is not a key of this server."
        page.fill("#key", KEY)
        page.click("button")
        explorer.settle()
        assert page.url.split("#")[0] == f"{address}/"
        [cookie] = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert KEY not in cookie["value"]
        # What a browser says of the two refusals, and nothing else (its advice on forms is of the kind "verbose").
        heard = [said for said in explorer.heard if not said.startswith("verbose")]
        assert all("401" in said for said in heard), heard
    context.close()
