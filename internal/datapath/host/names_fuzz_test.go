package host

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// FuzzDeviceID: a device is an endpoint's exactly when it has the name we would give it.
func FuzzDeviceID(f *testing.F) {
	for _, name := range []string{"pil1", "pil65535", "pil65536", "pil007", "pil", "pil-1", "eth0"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		link := netlink.NewVeth(netlink.LinkAttrs{Name: name})
		if id, ours := DeviceID(link); ours && DeviceName(id) != name {
			t.Errorf("%q is taken for endpoint %d", name, id)
		}
	})
}
