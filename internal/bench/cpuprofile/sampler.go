package cpuprofile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Sampler records the instruction that a CPU executes, after every Period of its busy time. On machines without
// non-maskable interrupts, such as virtual machines, the kernel cannot sample code that runs with interrupts disabled:
// it records the instruction that enables them again.
type Sampler struct {
	fd   int
	ring []byte // the first page is metadata of the kernel (perf_event_mmap_page)
}

const (
	Period      = 250 * time.Microsecond
	samplePages = 256 // of data: 32 bytes a sample, so eight seconds
)

// Sample is one sample.
type Sample struct {
	Address uint64 // of the instruction
	PID     uint32
	_       uint32 // thread
	At      int64  // CLOCK_MONOTONIC, ns
}

func NewSampler(cpu int) (*Sampler, error) {
	attr := unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_CPU_CLOCK,
		Size:   uint32(unsafe.Sizeof(unix.PerfEventAttr{})),
		Sample: uint64(Period), Sample_type: unix.PERF_SAMPLE_IP | unix.PERF_SAMPLE_TID | unix.PERF_SAMPLE_TIME,
		Bits: unix.PerfBitDisabled | unix.PerfBitExcludeIdle | unix.PerfBitUseClockID, Clockid: unix.CLOCK_MONOTONIC,
	}
	fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("sample CPU %d: %w", cpu, err)
	}
	ring, err := unix.Mmap(fd, 0, (1+samplePages)*unix.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("sample CPU %d: %w", cpu, err)
	}
	return &Sampler{fd, ring}, nil
}

func (s *Sampler) Close() error {
	err := unix.Munmap(s.ring)
	return errors.Join(err, unix.Close(s.fd))
}

func (s *Sampler) Start() error { return unix.IoctlSetInt(s.fd, unix.PERF_EVENT_IOC_ENABLE, 0) }

// Stop ends sampling, and returns the samples since Start.
func (s *Sampler) Stop() (all []Sample, err error) {
	if err := unix.IoctlSetInt(s.fd, unix.PERF_EVENT_IOC_DISABLE, 0); err != nil {
		return nil, fmt.Errorf("stop sampling: %w", err)
	}
	page := (*unix.PerfEventMmapPage)(unsafe.Pointer(unsafe.SliceData(s.ring)))
	data := s.ring[page.Data_offset:][:page.Data_size]
	read := func(at uint64, n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = data[(at+uint64(i))%page.Data_size]
		}
		return b
	}
	const header = 8
	for page.Data_tail < page.Data_head {
		head := read(page.Data_tail, header)
		kind, size := binary.NativeEndian.Uint32(head), binary.NativeEndian.Uint16(head[6:])
		switch kind {
		case unix.PERF_RECORD_SAMPLE:
			var is Sample
			if _, err := binary.Decode(read(page.Data_tail+header, int(size)-header), binary.NativeEndian,
				&is); err != nil {
				return nil, fmt.Errorf("read a sample: %w", err)
			}
			all = append(all, is)
		case unix.PERF_RECORD_LOST:
			return nil, errors.New("the kernel has lost samples")
		}
		page.Data_tail += uint64(size)
	}
	return all, nil
}
