package wire_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
)

// testPlanted sends one frame of each forbidden kind to the fabric, from a namespace without an agent. The judge must
// find exactly these frames.
func (b *bed) testPlanted(t *testing.T) {
	outside, err := b.Namespace(lab.Orchestrator)
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	inject, err := packet.NewInjector(outside, lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	defer inject.Close()

	find := func(name string) lab.ContainerStatus {
		c, err := b.Container(name)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	b1, b2, r3 := find("b1"), find("b2"), find("r3")
	udp := func(from, to netip.Addr, payload []byte) packet.Packet {
		return packet.Packet{Source: from, Destination: to,
			Body: packet.UDP{SourcePort: openPort, DestinationPort: openPort, Payload: payload}}
	}
	secret := b2.Address.As16()
	sound := udp(b1.Plaintext, b2.Plaintext, pattern(40))
	badSum := sound.Marshal()
	badSum[len(badSum)-1] ^= 1
	vxlan := packet.VXLAN(1, 0, sound.Frame(inject.MAC(), inject.MAC()))

	// The router captures these frames and then drops them, because none has a source of this link.
	planted := []struct {
		name    string
		packet  []byte
		finding string
	}{
		{"ciphertext as destination", udp(b1.Plaintext, b2.Address, nil).Marshal(), "ciphertext"},
		{"ciphertext as source", udp(b1.Address, b2.Plaintext, nil).Marshal(), "ciphertext"},
		{"ciphertext in a payload", udp(b1.Plaintext, b2.Plaintext, slices.Concat(pattern(7), secret[:])).Marshal(),
			"ciphertext"},
		{"half a ciphertext", udp(b1.Plaintext, b2.Plaintext, slices.Concat(pattern(3), secret[8:])).Marshal(),
			"ciphertext"},
		{"IPv6 in IPv6", packet.Packet{Source: b1.Plaintext, Destination: b2.Plaintext,
			Body: packet.Raw{Proto: 41, Data: sound.Marshal()}}.Marshal(), "not plain"},
		{"VXLAN", packet.Packet{Source: b1.Plaintext, Destination: b2.Plaintext,
			Body: packet.UDP{SourcePort: 40000, DestinationPort: 4789, Payload: vxlan}}.Marshal(), "not plain"},
		{"wrong checksum", badSum, "checksum"},
		{"wrong port", sound.Marshal(), "on a port of neither node"},
		{"two tenants", udp(b1.Plaintext, r3.Plaintext, nil).Marshal(), "two tenants"},
		{"unknown source", udp(b1.Plaintext.Next(), b2.Plaintext, nil).Marshal(), "is no container's"},
	}
	c := startCapture(b.ctx, t, b.router, b.ports)
	for _, p := range planted {
		if err := inject.Send(packet.Frame(inject.MAC(), inject.MAC(), packet.EtherTypeIPv6, p.packet)); err != nil {
			t.Fatal(err)
		}
	}
	r := c.stop(b.ctx, t)
	faulty := map[string][]string{} // findings by frame
	var order []string
	for _, finding := range b.judge.findings(t, r, r.frames(t), true) {
		number, fault, _ := strings.Cut(finding, ": ")
		if faulty[number] == nil {
			order = append(order, number) // a frame can also have a second fault, such as its port
		}
		faulty[number] = append(faulty[number], fault)
	}
	if len(order) != len(planted) {
		t.Fatalf("planted %d frames, found %d: %q", len(planted), len(order), faulty)
	}
	for i, p := range planted {
		found := faulty[order[i]]
		if !slices.ContainsFunc(found, func(f string) bool { return strings.Contains(f, p.finding) }) {
			t.Errorf("%s: found %q, want %q", p.name, found, p.finding)
		}
	}
}
