package nimitz_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/packet"
)

// onTheWire checks with tshark the packets of two tenants with the same addresses on the fabric: all must be VXLAN over
// IPv6 between the nodes' VTEPs, with the tenant's ID as VNI and the sender's identity as group policy (NM2, §3.1).
func onTheWire(t *testing.T, l *lab.Lab) {
	ctx := labtest.Context(t)
	router, err := l.Namespace(lab.Router)
	must(t, err)
	defer router.Close()
	capture, err := packet.NewCapture(router, "n2")
	must(t, err)
	defer capture.Close()

	var want []string
	for _, tenant := range []string{"green", "gold", "grey"} {
		from, err := l.Container(tenant + "1")
		must(t, err)
		to, err := l.Container(tenant + "3")
		must(t, err)
		got, err := l.Operator().GetTenant(ctx, connect.NewRequest(&pilasterv1.GetTenantRequest{Name: tenant}))
		must(t, err)
		for i, a := range to.Addresses() {
			if _, answered := echo(ctx, t, l, from.Name, a, 5*time.Second); !answered {
				t.Fatalf("%s cannot reach %v", from.Name, a)
			}
			want = append(want, fmt.Sprint(vtep(t, l, "n1"), vtep(t, l, "n2"), got.Msg.Tenant.Ids[0].Id, from.App,
				from.Addresses()[i], a))
		}
	}
	last, answered := echo(ctx, t, l, "blue1", address(t, l, "blue3"), 5*time.Second)
	if !answered {
		t.Fatal("blue1 cannot reach blue3")
	}
	var seen []string
	for _, line := range decode(t, until(ctx, t, capture, last)) {
		if f := strings.Split(line, "\t"); f[0] == "4789" && f[1] == "request" {
			seen = append(seen, strings.Join(f[2:], " "))
		}
	}
	slices.Sort(seen)
	slices.Sort(want)
	if !slices.Equal(seen, want) {
		t.Errorf("tshark: got\n%s\nwant\n%s", strings.Join(seen, "\n"), strings.Join(want, "\n"))
	}
}

func vtep(t *testing.T, l *lab.Lab, node string) netip.Addr {
	t.Helper()
	p, err := l.Prefix(node)
	must(t, err)
	return pipeline.VTEP(p)
}

func address(t *testing.T, l *lab.Lab, name string) netip.Addr {
	t.Helper()
	a, err := l.Address(name)
	must(t, err)
	return a
}

// decode runs tshark on frames. It returns a line for each frame: UDP port, "request" for an echo request, outer
// addresses, VNI, group policy and inner addresses.
func decode(t *testing.T, frames []packet.Captured) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "n2.pcap")
	var b bytes.Buffer
	for _, word := range []uint32{0xa1b2c3d4, 2 | 4<<16, 0, 0, 1 << 18, 1} { // pcap 2.4, Ethernet
		must(t, binary.Write(&b, binary.LittleEndian, word))
	}
	for _, f := range frames {
		n := uint32(len(f.Frame))
		must(t, binary.Write(&b, binary.LittleEndian, []uint32{uint32(f.Time.Unix()), 0, n, n}))
		b.Write(f.Frame)
	}
	must(t, os.WriteFile(file, b.Bytes(), 0o600))
	args := []string{"-n", "-r", file, "-T", "fields", "-E", "separator=|", "-E", "aggregator=,"}
	for _, field := range []string{"udp.dstport", "vxlan.vni", "vxlan.gbp", "ipv6.src", "ipv6.dst", "ip.src", "ip.dst",
		"icmp.type", "icmpv6.type"} {
		args = append(args, "-e", field)
	}
	out, err := exec.Command("tshark", args...).Output()
	must(t, err)
	var lines []string
	for line := range strings.Lines(string(out)) {
		lines = append(lines, inWords(strings.Split(strings.TrimRight(line, "\n"), "|")))
	}
	return lines
}

// inWords returns tshark's fields in decode's order.
func inWords(f []string) string {
	src, dst := strings.Split(f[3], ","), strings.Split(f[4], ",")
	if f[5] != "" {
		src, dst = append(src, f[5]), append(dst, f[6])
	}
	kind := ""
	if f[7] == "8" || f[8] == "128" {
		kind = "request"
	}
	return strings.Join([]string{f[0], kind, src[0], dst[0], f[1], f[2], src[len(src)-1], dst[len(dst)-1]}, "\t")
}
