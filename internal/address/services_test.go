package address

import (
	"net/netip"
	"strings"
	"testing"
)

func TestServicePrefix(t *testing.T) {
	if p, err := DefaultPlan().ServicePrefix(); err != nil || p.String() != "fd70:696c:7300::/40" {
		t.Errorf("%v, %v", p, err)
	}
	for name, change := range map[string]func(*Plan, netip.Prefix){
		"base":    func(p *Plan, of netip.Prefix) { p.Base = of },
		"private": func(p *Plan, of netip.Prefix) { p.Private = of },
		"gateway": func(p *Plan, of netip.Prefix) { p.Gateway6 = of },
		"egress":  func(p *Plan, of netip.Prefix) { p.Egress = of },
	} {
		for text, overlaps := range map[string]bool{
			"fd70:696c:7300::/48": true, "fd00::/8": true, "fd70:696c:7400::/40": false,
		} {
			p := Plan{}
			change(&p, netip.MustParsePrefix(text))
			if _, err := p.ServicePrefix(); (err != nil) != overlaps {
				t.Errorf("%s prefix %s: %v", name, text, err)
			}
		}
	}
	// The prefix of network ila follows from this base prefix, and is fd70:696c:7300::/40.
	p := Plan{Base: netip.MustParsePrefix("fd70:696c:f300::/40")}
	if _, err := p.ServicePrefix(); err == nil || !strings.Contains(err.Error(), "overlaps this cluster's") {
		t.Errorf("base prefix %v: %v", p.Base, err)
	}
}

func TestTenantServices(t *testing.T) {
	for number, want := range map[uint32]string{
		1: "fd70:696c:7300:1::/64", 0x123456: "fd70:696c:7312:3456::/64", 1<<24 - 1: "fd70:696c:73ff:ffff::/64",
		0: "", 1 << 24: "",
	} {
		got, err := DefaultPlan().TenantServices(number)
		if (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("number %d: %v, %v, want %s", number, got, err, want)
		}
	}
}
