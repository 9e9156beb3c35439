package progrun

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// EmptyProgram returns the time in ns that the kernel's run-time statistics, which must be on, report for an empty
// program: the cost of reading the clock, which every program's time includes.
func EmptyProgram() (float64, error) {
	const runs = 100_000
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return 0, fmt.Errorf("load an empty program: %w", err)
	}
	defer p.Close()
	if _, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64), Repeat: runs}); err != nil {
		return 0, fmt.Errorf("run an empty program: %w", err)
	}
	stats, err := p.Stats()
	if err != nil {
		return 0, fmt.Errorf("statistics of an empty program: %w", err)
	}
	return float64(stats.Runtime.Nanoseconds()) / float64(max(stats.RunCount, 1)), nil
}
