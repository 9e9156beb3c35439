package policy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

func labeled(app string) map[string]string {
	return map[string]string{tenant.NamespaceKey: "shop", "app": app}
}

// selecting returns a policy that isolates the containers of an app, or of the whole namespace, and accepts a number of
// blocks.
func selecting(name, app string, blocks int) Policy {
	p := Policy{
		Tier:      NetworkPolicy,
		Namespace: "shop",
		Name:      name,
		Subject:   Pods{Namespace: "shop"},
		Isolates:  [2]bool{true, false},
	}
	if app != "" {
		p.Subject.Labels = Selector{{Key: "app", Operator: In, Values: []string{app}}}
	}
	r := Rule{Action: Accept}
	for i := range blocks {
		r.Blocks = append(
			r.Blocks,
			Block{
				Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 15), byte(i >> 7), byte(i << 1)}), 32),
			},
		)
	}
	p.Rules[Ingress] = []Rule{r}
	return p
}

// TestFit: the policies of each app may use the whole room of a node, whatever the policies of other apps need. If each
// node has the tables of all apps, all apps share the room.
func TestFit(t *testing.T) {
	const room = 1000 // entries
	apps := map[address.AppID]map[string]string{}
	for i := range 20 {
		apps[address.AppID(i+1)] = labeled(fmt.Sprint("a", i))
	}
	var each []Policy
	for i := range 20 {
		p := selecting(fmt.Sprint("p", i), fmt.Sprint("a", i), 600)
		// otherwise the apps would share a table
		p.Rules[Ingress][0].Blocks[i].Prefix = netip.MustParsePrefix("192.0.2.0/24")
		each = append(each, p)
	}
	all := func(*Policy) bool { return true }
	for name, c := range map[string]struct {
		policies []Policy
		changed  func(*Policy) bool
		together bool
		want     string // part of the error; empty for no error
	}{
		"each for itself": {each, all, false, ""},
		"all of them":     {each, all, true, "entries of blocks on a node, more than 1,000"},
		"one that is too large": {[]Policy{selecting("p", "a3", room+1)}, all, false,
			"the policies that select app 4 (app=a3,"},
		"one that selects no app yet": {[]Policy{selecting("p", "a20", room+1), selecting("q", "a20", 1)}, all, false,
			"NetworkPolicy shop/p: they need"},
		"two together": {[]Policy{selecting("p", "a3", room-10), each[3]}, all, false, ""},
		"one that has not changed": {[]Policy{selecting("p", "a3", room+1), selecting("q", "a4", 1)},
			func(p *Policy) bool { return p.Name == "q" }, false, ""},
		"a small one beside it": {[]Policy{selecting("p", "a3", room+1), selecting("q", "a3", 1)},
			func(p *Policy) bool { return p.Name == "q" }, false, "the policies that select app 4"},
		"one that selects all": {
			[]Policy{{Tier: Admin, Name: "p", Subject: Pods{}, Rules: [2][]Rule{{withRanges(5000)}}}}, all, false,
			"the policies that select all containers: 5,000 ranges of ports",
		},
	} {
		err := Fit(t.Context(), "blue", c.policies, c.changed, apps, c.together, room)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := Fit(ended, "blue", each, all, apps, false, room); !errors.Is(err, context.Canceled) {
		t.Errorf("call with an ended context: %v", err)
	}
}

func withRanges(n uint16) Rule {
	r := Rule{Action: Deny, Everyone: true}
	for i := range n {
		r.Ports = append(r.Ports, Port{Protocol: TCP, First: i + 1, Last: i + 1000})
	}
	return r
}
