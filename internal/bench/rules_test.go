package bench

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/bench/progrun"
	"pilaster.io/pilaster/internal/bench/scenario"
)

// TestPolicyReport: the report has figures by number of rules, for policies and for netfilter, and compares them with
// the figures without rules.
func TestPolicyReport(t *testing.T) {
	like, o := tiny(t), SmokePolicy()
	o.Lookups.Packets, o.Lookups.Rounds, o.Rounds, o.Window, o.Warmup = 200, 1, 1, like.Window, like.Warmup
	o.Generator, o.Progress, o.Dir, o.CPU = like.Generator, like.Progress, like.Dir, like.CPU
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	// All combinations for the first size, and one combination for the other size.
	if want := 1*2 + 2*(4+1); len(r.Lookups) != want {
		t.Errorf("got %d rows of lookups, want %d: %+v", len(r.Lookups), want, r.Lookups)
	}
	for _, c := range r.Lookups {
		if c.Ns.Median <= 0 {
			t.Errorf("no time measured: %+v", c)
		}
	}
	for of, against := range map[string]string{"netpila-rules-100": "netpila", "route-rules-100": "route"} {
		if !slices.ContainsFunc(
			r.Beside,
			func(c Comparison) bool { return c.Scenario == of && c.Against == against && c.Metric == "TCP_CRR" },
		) {
			t.Errorf("no comparison of %s with %s: %+v", of, against, r.Beside)
		}
	}
	var text, page strings.Builder
	r.Table(&text)
	if err := r.Page(&page); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"blocks\tbegun", "labels\tfound"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q", want)
		}
	}
	if !strings.Contains(page.String(), "Nezha table A1") {
		t.Error("the page lacks the paper's figure")
	}
}

// TestRulesDecide: ApplyPolicy fails if a rule other than the last one decides.
func TestRulesDecide(t *testing.T) {
	bed, err := progrun.NewBed(filepath.Join(t.TempDir(), "rules"), 1, 1, placesOfBench)
	if err != nil {
		t.Fatal(err)
	}
	defer bed.Close()
	local, peer := bed.Endpoints[0].Plain, netip.MustParseAddr("2001:db8:1::1")
	p, apps := rulesBy(byAddresses, 3, peer)
	if err := scenario.ApplyPolicy(bed.Datapath, local.Tenant, p, apps, local.Addr(), peer); err != nil {
		t.Errorf("ApplyPolicy failed although the last rule decides: %v", err)
	}
	if err := scenario.ApplyPolicy(bed.Datapath, local.Tenant, p, apps, local.Addr(),
		netip.MustParseAddr("2001:db8:72::1")); err == nil {
		t.Error("ApplyPolicy succeeded although the first rule decides")
	}
}
