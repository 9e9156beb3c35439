package datapath

import (
	"os"
	"path/filepath"
	"testing"
)

// TestSettingsOfAllDevices: the kernel copies a setting of "all" to each device, also to ours.
func TestSettingsOfAllDevices(t *testing.T) {
	w := newWireOf(t, paired)
	n := w.nodes[0]
	c, far := n.add(t, blue, 1), w.nodes[1].add(t, blue, 1)
	all := func(setting string, values ...string) {
		t.Helper()
		for _, v := range values {
			must(t, n.ns.Do(func() error {
				return os.WriteFile(filepath.Join("/proc/sys/net", setting[:4], "conf/all", setting[5:]), []byte(v), 0)
			}))
		}
	}
	for name, write := range map[string]func(){
		"a router no more": func() { all("ipv6/forwarding", "1", "0") },
		"IPv6 everywhere":  func() { all("ipv6/disable_ipv6", "0") },
		"a router of IPv4": func() { all("ipv4/forwarding", "0", "1") },
	} {
		write()
		if err := n.datapath.Driver(c.record).Check(c.record); err == nil {
			t.Errorf("%s: the device is as it was", name)
		}
		must(t, n.datapath.ReconcileSettings())
		if err := n.datapath.checkEndpoint(t.Context(), c.record); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		mustReach(t, c, far, name)
		transfer(t, n.self(), c, 1000)
	}
}
