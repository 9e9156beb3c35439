package datapath

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// BenchmarkAttach measures for each kind of hook how long attaching and detaching takes, which happens once for each
// container. Its results are the reason why the container program is a cls_bpf filter.
func BenchmarkAttach(b *testing.B) {
	w := newWire(b)
	c := w.nodes[0].add(b, blue, 1)
	n := w.nodes[0]
	b.Run("cls_bpf", func(b *testing.B) {
		for b.Loop() {
			must(b, n.detachContainer(c.record))
			must(b, n.datapath.Driver(c.record).AttachProgram(c.record))
		}
	})
	b.Run("tcx", func(b *testing.B) {
		must(b, n.ns.Do(func() error {
			for b.Loop() {
				l, err := link.AttachTCX(link.TCXOptions{
					Interface: c.record.Device.HostIfindex, Program: n.datapath.Objects.PilContainer,
					Attach: ebpf.AttachTCXIngress,
				})
				if err != nil {
					return err
				}
				if err := l.Close(); err != nil {
					return err
				}
			}
			return nil
		}))
	})
}
