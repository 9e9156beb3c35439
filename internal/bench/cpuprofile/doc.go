// Package cpuprofile samples one CPU with perf events and attributes each sample to a part of the packet path.
package cpuprofile
