package policy

import (
	"context"
	"fmt"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// Room is how many entries of each table a tenant may have on a node as it is installed: half, for no tenant takes more
// than it leaves free.
const Room = 1 << 17

// Fit refuses policies that no node could enforce, before anybody has them: those of one app alone that cannot be
// compiled, or for which nodes have no room. It looks at the apps that changed policies select, and at a policy by
// itself that selects none yet. Where nodes judge what containers of others begin, each has the tables of all apps, so
// these are looked at together. Most is the entries of a table that there is room for, Room or more.
func Fit(
	ctx context.Context,
	name string,
	policies []Policy,
	changed func(*Policy) bool,
	apps map[address.AppID]map[string]string,
	together bool,
	most int,
) error {
	c, err := newCompiler(name, policies, NewIndex(apps))
	if err != nil {
		return err
	}
	c.most = min(most, maxEntries)
	called := func(at int) string {
		if at == c.index.unknown() {
			return "all containers"
		}
		return fmt.Sprintf("app %d (%s)", c.appAt(at), tenant.Canonical(apps[c.appAt(at)]))
	}
	concerned := c.index.empty()
	for i, p := range c.policies {
		if !changed(p) {
			continue
		}
		those := c.index.selected(p.Subject)
		if concerned.or(those); !those.any() { // it waits for containers that none would start
			var alone selection
			alone.add(i, p)
			if _, err := c.subject(c.index.unknown(), alone); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
			c.clear()
		}
	}
	var places []int
	for at := c.index.unknown(); at >= 0; at-- { // first who is not known, whom policies for all select
		if together || concerned.has(at) {
			places = append(places, at)
		}
	}
	selecting, fitted := c.selecting(places), map[string]bool{}
	for i, at := range places {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf(
				"whether nodes have room for the policies was not found out in time: %w; apply fewer at once, or "+
					"with a higher --timeout",
				err,
			)
		}
		madeOf := ""
		for _, d := range directions {
			madeOf += c.madeOf(d, selecting[i][d].enforced, at) + c.madeOf(d, selecting[i][d].all, at)
		}
		if fitted[madeOf] {
			continue
		}
		fitted[madeOf] = true
		if !together {
			c.clear()
		}
		if _, err := c.subject(at, selecting[i]); err != nil {
			return fmt.Errorf("the policies that select %s: %w", called(at), err)
		}
	}
	return nil
}
