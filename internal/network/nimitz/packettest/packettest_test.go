package packettest

import (
	"slices"
	"testing"

	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
)

// TestCases: the results of the cases include every way out of the pipeline and every drop reason.
func TestCases(t *testing.T) {
	names, ports, reasons := map[string]bool{}, map[pipeline.Port]int{}, map[dropreason.Reason]int{}
	for _, c := range Cases() {
		if names[c.Name] {
			t.Errorf("two cases are called %s", c.Name)
		}
		names[c.Name] = true
		got := c.Want()
		if got.Drop != 0 {
			reasons[got.Drop]++
		} else {
			ports[got.To]++
		}
		if (got.Drop == 0) != (got.Frame != nil) {
			t.Errorf("%s: %+v", c.Name, got)
		}
	}
	for _, port := range append(Ports, pipeline.VXLAN, pipeline.Gateway) {
		if ports[port] == 0 && port != 4 {
			t.Errorf("nothing goes to %v", port)
		}
	}
	for _, why := range []dropreason.Reason{dropreason.NotIp6, dropreason.SrcNotOwn, dropreason.NoEndpoint,
		dropreason.NoRoute, dropreason.PeerUnknown, dropreason.ForeignUnknown, dropreason.Multicast,
		dropreason.HopLimit, dropreason.Untranslated, dropreason.NdForbidden,
		dropreason.RoutingHeader, dropreason.Malformed, dropreason.IcmpQuote} {
		if reasons[why] == 0 {
			t.Errorf("nothing is dropped for %v", why)
		}
	}
}

// TestStages: the counters by stage do not all stay 0.
func TestStages(t *testing.T) {
	counts := pipeline.Count(Entries())
	stages := slices.DeleteFunc(slices.Clone(pipeline.Stages), func(s pipeline.Stage) bool {
		return s == pipeline.Sharing // of several nodes: TestFrontends
	})
	for _, s := range stages {
		if counts[s] == 0 {
			t.Errorf("no kind of entry is of stage %v", s)
		}
	}
	if len(counts) != len(stages) {
		t.Errorf("entries of %v, and stages are %v", counts, stages)
	}
}
