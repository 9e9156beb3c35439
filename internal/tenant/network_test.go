package tenant

import (
	"net/netip"
	"strings"
	"testing"
)

func TestCheckNetwork(t *testing.T) {
	overlays := []Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), NodeBits: 24}}
	for name, c := range map[string]struct {
		t     Tenant
		words string // of the error; empty: accepted
	}{
		"netpila":             {Tenant{Network: Netpila, Addressing: Encrypted}, ""},
		"netpila, clear":      {Tenant{Network: Netpila, Addressing: Clear}, ""},
		"netpila, of its own": {Tenant{Network: Netpila, Addressing: Own}, "do not go together"},
		"netpila with a CIDR": {Tenant{Network: Netpila, Addressing: Clear, Overlays: overlays},
			"do not go together"},
		"nimitz":                {Tenant{Network: Nimitz, Addressing: Own, Overlays: overlays}, ""},
		"nimitz without a CIDR": {Tenant{Network: Nimitz, Addressing: Own}, "do not go together"},
		"nimitz, encrypted": {Tenant{Network: Nimitz, Addressing: Encrypted, Overlays: overlays},
			"do not go together"},
		"with host bits": {Tenant{Network: Nimitz, Addressing: Own,
			Overlays: []Overlay{{CIDR: netip.MustParsePrefix("10.0.0.1/16")}}}, "host bits"},
		"moving": {Tenant{Network: Netpila, Leaving: Nimitz, Addressing: Clear, Overlays: overlays},
			""},
		"moving without its CIDR": {Tenant{Network: Netpila, Leaving: Nimitz, Addressing: Clear},
			"do not go together"},
		"moving the other way": {Tenant{Network: Nimitz, Leaving: Netpila, Addressing: Own, Overlays: overlays},
			"does not know how"},
		"moving from where it is": {Tenant{Network: Nimitz, Leaving: Nimitz, Addressing: Own, Overlays: overlays},
			"does not know how"},
		"moving from another": {Tenant{Network: Netpila, Leaving: "later", Addressing: Clear},
			"does not know how"},
		"on a network of tomorrow": {Tenant{Network: "later", Addressing: Own},
			`network "later", which this build does not know`},
	} {
		err := c.t.CheckNetwork()
		if (err == nil) != (c.words == "") || err != nil && !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v, want %q", name, err, c.words)
		}
	}
	for _, name := range Networks() {
		if on, ok := TraitsOf(name); !ok || len(on.Addressings) == 0 {
			t.Errorf("network %s: %+v, %v", name, on, ok)
		}
	}
}
