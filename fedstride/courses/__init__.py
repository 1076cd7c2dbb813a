"""What happens when in an asynchronous run: clients that start, finish and send, a server that takes what arrives.

A course knows who and when, never what: no vectors pass through it. The simulator asks it for the next reply that
reaches the server and computes the content then, or never, if nobody asks. All of its state is plain data.
"""

from fedstride.courses.base import Course, Job, Work
from fedstride.courses.buffered import BufferedCourse
from fedstride.courses.receiving import FirstArrivalsCourse, SendBuffersCourse
from fedstride.courses.replay import ReplayCourse

__all__ = ["BufferedCourse", "Course", "FirstArrivalsCourse", "Job", "ReplayCourse", "SendBuffersCourse", "Work"]
