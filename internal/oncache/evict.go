package oncache

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Layouts of bpf/oncache/tables.h; the tests compare their sizes.
type (
	innerKey struct {
		Address [16]byte
		VNI     uint32
	}
	egressEntry struct {
		VTEP [16]byte
		MACs [12]byte
		MTU  uint32
	}
	vtepEntry struct {
		Headers    [72]byte
		Uplink, ID uint32
	}
	ingressEntry struct {
		Device, MTU uint32
		MACs        [12]byte
	}
	flowKey struct {
		Local, Remote         [16]byte
		LocalPort, RemotePort [2]byte
		VNIProto              uint32
	}
	verdict struct {
		Out, In            uint64
		Generation, Device uint32
		MACs               [12]byte
		_                  uint32
	}
)

// Evict removes entries and returns how many. It also works without Pause: then nothing that the overlay handled before
// is learnt afterwards.
func (o *Cache) Evict(s Selector) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	paused := o.marks == 0
	o.marks = 0
	if s.All {
		o.filter++
	}
	if err := o.publish(); err != nil {
		return 0, err
	}
	n, err := o.evict(s)
	o.evicted += uint64(n)
	if !paused {
		o.resume()
		err = errors.Join(err, o.publish())
	}
	return n, err
}

func (o *Cache) evict(s Selector) (n int, err error) {
	inner, vtep := as16(s.Inner), as16(s.VTEP)
	remote := map[[16]byte]bool{} // behind the VTEP, or with the MAC
	for _, step := range []func() (int, error){
		func() (int, error) {
			return remove(o.objects.OnceEgress, func(k innerKey, e egressEntry) bool {
				behind := s.VTEP.IsValid() && e.VTEP == vtep || s.MAC != [6]byte{} && [6]byte(e.MACs[:6]) == s.MAC
				remote[k.Address] = behind
				return s.All || behind || s.Inner.IsValid() && k.Address == inner
			})
		},
		func() (int, error) {
			return remove(o.objects.OnceVtep, func(k [16]byte, _ vtepEntry) bool {
				return s.All || s.VTEP.IsValid() && k == vtep
			})
		},
		func() (int, error) {
			return remove(o.objects.OnceIngress, func(k innerKey, e ingressEntry) bool {
				return s.All || s.Device != 0 && e.Device == s.Device || s.Inner.IsValid() && k.Address == inner
			})
		},
		func() (int, error) { // what replaces the device may send from another MAC
			_, err := remove(o.objects.OnceSender, func(k uint32, _ uint64) bool {
				return s.Device != 0 && k == s.Device
			})
			return 0, err
		},
		func() (int, error) {
			return remove(o.objects.OnceFilter, func(k flowKey, v verdict) bool {
				return s.All || s.Device != 0 && v.Device == s.Device || remote[k.Remote] ||
					s.Inner.IsValid() && (k.Local == inner || k.Remote == inner)
			})
		},
	} {
		removed, failed := step()
		n, err = n+removed, errors.Join(err, failed)
	}
	return n, err
}

func as16(a netip.Addr) (b [16]byte) {
	if a.IsValid() {
		b = a.As16()
	}
	return b
}

// remove deletes the entries that selected returns true for. Nothing is added meanwhile, because learning is paused.
func remove[K, V any](m *ebpf.Map, selected func(K, V) bool) (n int, err error) {
	var doomed []K
	err = each(m, func(k K, v V) {
		if selected(k, v) {
			doomed = append(doomed, k)
		}
	})
	for _, k := range doomed {
		switch failed := m.Delete(k); {
		case failed == nil:
			n++
		case !errors.Is(failed, ebpf.ErrKeyNotExist):
			err = errors.Join(err, failed)
		}
	}
	if err != nil {
		return n, fmt.Errorf("oncache: evict from %s: %w", m, err)
	}
	return n, nil
}

// each calls f for the entries of a map, by batches. An entry may come twice.
func each[K, V any](m *ebpf.Map, f func(K, V)) error {
	const batch = 1024
	keys, values := make([]K, batch), make([]V, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			f(keys[i], values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case err != nil:
			return err
		}
	}
}
