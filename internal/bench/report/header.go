// Package report has the common parts of all benchmarks' reports: the header with machine and time, medians with
// bootstrap intervals, formats of numbers, and the frame of the HTML page.
package report

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/plot"
)

// Header is the common part of the reports of all suites.
type Header struct {
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"`
	Machine Machine   `json:"machine"`
}

// Machine is the machine of a report.
type Machine struct {
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"`
}

// NewHeader returns the header of a run that began at started and ends now.
func NewHeader(started time.Time) Header {
	return Header{
		Started: started.UTC().Truncate(time.Second),
		Seconds: time.Since(started).Round(100 * time.Millisecond).Seconds(),
		Machine: Machine{Kernel: kernel(), Arch: runtime.GOARCH, CPUs: runtime.NumCPU()},
	}
}

// WritePage writes a report as one HTML file. guide names the document that explains its figures.
func (h Header) WritePage(w io.Writer, p plot.Page, guide string, facts ...string) error {
	when := h.Started.Format(time.RFC3339)
	p.Title += ", " + when
	p.Facts = append([]string{
		when, fmt.Sprintf("%.0f s", h.Seconds),
		fmt.Sprintf("%d CPUs, %s, Linux %s", h.Machine.CPUs, h.Machine.Arch, h.Machine.Kernel),
	}, facts...)
	p.Foot = append(p.Foot, plot.Note{Class: "soft", Text: "All figures are in report.json beside this file. " + guide})
	return p.Write(w)
}

// BarNote explains the bars of a page.
const BarNote = "Bars are medians; the line on a bar is the interval that holds 95 % of resampled medians."

// NameWidth is the width for names of bars.
const NameWidth = 270

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return string(u.Release[:bytes.IndexByte(u.Release[:], 0)])
}
